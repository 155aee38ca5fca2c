from __future__ import annotations

from dataclasses import replace

import pytest
from paged_batches import make_batch

from decodefleet.kernels.launch import CHIPS, Chip
from decodefleet.kernels.paged_attention.plan import (
    INVARIANT_SPLIT,
    MAX_SPLITS,
    SPLIT_STEP,
    Phases,
    Splits,
    plan_phases,
    plan_splits,
    plan_tiles,
)


def splits(programs: int, keys: int, *, windowed: bool = False, invariant: bool = False) -> Splits:
    return plan_splits(
        programs=programs, keys=keys, windowed=windowed, multiprocessors=132, resident=2, invariant=invariant
    )


@pytest.mark.parametrize("programs", [1, 8, 64, 512, 4096])
@pytest.mark.parametrize("keys", [1, 15, 128, 129, 4096, 131072])
def test_splits_are_as_many_as_there_is_work_for(programs: int, keys: int) -> None:
    count = splits(programs, keys).count
    assert 1 <= count <= MAX_SPLITS
    assert count == 1 or (count - 1) * SPLIT_STEP < keys


def test_one_long_sequence_fills_the_chip() -> None:
    assert 8 * splits(8, 32768).count >= 132


def test_a_full_chip_is_not_split_further() -> None:
    assert splits(4 * 264, 4096).count == 1


def test_a_round_that_would_be_half_empty_is_split() -> None:
    # 300 programs on 264 places take two rounds, the second of them nearly empty
    assert splits(300, 32768).count > 1


def test_short_sequences_are_not_split() -> None:
    assert splits(8, 128).count == 1


@pytest.mark.parametrize("programs", [1, 512])
def test_invariant_splits_depend_on_length_alone(programs: int) -> None:
    assert splits(programs, 4096, invariant=True) == Splits(4096 // INVARIANT_SPLIT, INVARIANT_SPLIT)
    assert splits(programs, 1, invariant=True).count == 1
    # a window of 600 keys may touch three splits of 512
    assert splits(programs, 600, windowed=True, invariant=True).count == 3


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_tiles_cover_the_rows(chip: Chip, head_dim: int) -> None:
    for kind in ("decode", "prefill", "invariant"):
        for rows in (1, 3, 16, 17, 71 * 8):
            tiles = plan_tiles(rows, head_dim, kind=kind, chip=chip)
            assert tiles.row_tiles * tiles.block_m >= rows
            assert tiles.block_m >= 16
            assert INVARIANT_SPLIT % tiles.params.blocks["BLOCK_N"] == 0
            assert SPLIT_STEP % tiles.params.blocks["BLOCK_N"] == 0
    small = plan_tiles(4, head_dim, kind="decode", chip=chip)
    assert (small.block_m, small.row_tiles) == (16, 1)


def test_phases() -> None:
    decodes = make_batch([(9, 1), (40, 4)]).meta
    assert plan_phases(decodes, 2) == Phases(2, 4)
    mixed = make_batch([(9, 1), (40, 1), (0, 50)]).meta
    assert plan_phases(mixed, 3) == Phases(0, 1)
    assert plan_phases(replace(mixed, decodes=2, decode_query=1), 3) == Phases(2, 1)

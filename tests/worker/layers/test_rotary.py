from __future__ import annotations

import math

import pytest
import torch

from decodefleet.worker.assets.rope import Rope
from decodefleet.worker.layers.rotary import EndlessRope, RopeTable, make_rope

CPU = torch.device("cpu")
ROPE, D = Rope(10_000.0, None), 8


def test_any_position_is_exact() -> None:
    """Against Python's doubles; a table in fp32 is wrong in the first digit by then."""
    positions = [0, 1, 100, 10**6, 10**9 + 7]
    angles = EndlessRope(ROPE, D, None, CPU).angles(torch.tensor(positions))
    assert angles.sink_rows_T is None
    for row, position in zip(angles.rows_T.tolist(), positions, strict=True):
        for i in range(D // 2):
            # the frequencies are fp32 numbers, as in the checkpoints' reference
            frequency = float(torch.pow(torch.tensor(10_000.0), torch.tensor(2 * i / D)).reciprocal())
            wanted = math.cos(position * frequency), math.sin(position * frequency)
            found = angles.cos_sin_PR[row, i], angles.cos_sin_PR[row, i + D // 2]
            assert found == pytest.approx(wanted, abs=1e-6)


def test_the_table_and_the_rows_of_a_step_agree_where_both_are() -> None:
    positions = torch.arange(500)
    table, endless = (
        RopeTable(ROPE, D, 500, CPU).angles(positions),
        EndlessRope(ROPE, D, 70, CPU).angles(positions),
    )
    assert table.sink_rows_T is None
    torch.testing.assert_close(
        table.cos_sin_PR[table.rows_T], endless.cos_sin_PR[endless.rows_T], atol=5e-5, rtol=0
    )


def test_queries_meet_sinks_from_within_the_span() -> None:
    positions = torch.tensor([3, 69, 70, 10**7])
    angles = EndlessRope(ROPE, D, 70, CPU).angles(positions)
    assert angles.sink_rows_T is not None
    plain = EndlessRope(ROPE, D, None, CPU).angles(torch.tensor([3, 69, 69, 69]))
    assert torch.equal(angles.cos_sin_PR[angles.sink_rows_T], plain.cos_sin_PR)


def test_a_tokens_angles_do_not_depend_on_the_step() -> None:
    rope, positions = EndlessRope(Rope(500_000.0, None), 64, 70, CPU), torch.randint(0, 10**6, (37,))
    together = rope.angles(positions)
    assert together.sink_rows_T is not None
    for i, position in enumerate(positions):
        alone = rope.angles(position.view(1))
        assert alone.sink_rows_T is not None
        assert torch.equal(alone.cos_sin_PR[0], together.cos_sin_PR[i])
        assert torch.equal(
            alone.cos_sin_PR[alone.sink_rows_T[0]], together.cos_sin_PR[together.sink_rows_T[i]]
        )


def test_models_without_a_limit_have_no_table() -> None:
    assert isinstance(make_rope(ROPE, D, 100, None, CPU), RopeTable)
    assert isinstance(make_rope(ROPE, D, None, 70, CPU), EndlessRope)

"""Every kernel and variant compiles for every chip that is supported, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from decodefleet.kernels.aot import Compiled, compile_variants, variants
from decodefleet.kernels.launch import CHIPS
from decodefleet.kernels.tuning import TABLE, params

FROZEN = Path(__file__).parent / "variants.txt"


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return compile_variants(variants())


# minutes of compiling where nothing is cached
@pytest.mark.slow
@pytest.mark.timeout(900)
class TestCompiled:
    def test_no_variant_disappeared(self, compiled: list[Compiled]) -> None:
        """A new one is added to the list by hand."""
        rows = sorted({f"{row.kernel}: {row.variant}" for row in compiled})
        assert rows == FROZEN.read_text(encoding="utf-8").splitlines()
        assert {row.target for row in compiled} == set(CHIPS)

    def test_decode_kernels_do_not_spill(self, compiled: list[Compiled]) -> None:
        decode = [row for row in compiled if row.kernel in ("decode", "merge", "rotary_store")]
        assert len(decode) >= 4 * 20
        assert [row for row in decode if row.spills] == []
        few = [row for row in compiled if row.kernel == "linear" and "rows" not in row.variant]
        assert len(few) >= 4 * 8
        assert [row for row in few if row.spills] == []

    def test_what_is_reported_fits_the_chip(self, compiled: list[Compiled]) -> None:
        for row in compiled:
            assert 0 < row.registers <= 512
            assert row.shared <= {"gfx942": 64 << 10, "sm_80": 163 << 10}.get(row.target, 227 << 10)
            assert row.warps in (1, 2, 4, 8, 16)
            assert 0 < row.occupancy <= 1


def test_every_chip_has_launch_parameters() -> None:
    for operation, shape in TABLE:
        for chip in CHIPS.values():
            assert params(operation, shape, chip).warps >= 1


def test_the_chip_itself_goes_before_its_family() -> None:
    rows = TABLE["linear", "some"]
    assert params("linear", "some", CHIPS["gfx942"]) is rows["gfx9"]
    assert params("linear", "some", CHIPS["sm_100"]) is rows["sm_10"]
    assert params("linear", "some", CHIPS["sm_80"]) is rows["*"]

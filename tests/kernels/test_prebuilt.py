"""CPU kernels compiled ahead: which fits a processor, and that they load and compute."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from decodefleet.kernels.cpu import native, prebuilt
from decodefleet.kernels.cpu.prebuilt import LEVELS, find, path_of, processor_flags

SOURCES = "digest"
OLD, WIDE = LEVELS["x86-64-v3"], LEVELS["x86-64-v4"]


def touched(folder: Path, *levels: str) -> Path:
    for level in levels:
        path_of(level, SOURCES, folder).touch()
    return folder


@pytest.mark.parametrize(
    ("flags", "there", "expected"),
    [
        (WIDE | {"sse4_2"}, ("x86-64-v3", "x86-64-v4"), "x86-64-v4"),
        (WIDE, ("x86-64-v3",), "x86-64-v3"),
        (OLD, ("x86-64-v3", "x86-64-v4"), "x86-64-v3"),
        (OLD, ("x86-64-v4",), None),
        (frozenset(), ("x86-64-v3", "x86-64-v4"), None),
    ],
)
def test_the_best_that_the_processor_can_run(
    tmp_path: Path, flags: frozenset[str], there: tuple[str, ...], expected: str | None
) -> None:
    found = find(SOURCES, flags, touched(tmp_path, *there))
    assert (found[0] if found else None) == expected


def test_one_of_other_sources_is_not_taken(tmp_path: Path) -> None:
    assert find("changed", WIDE, touched(tmp_path, *LEVELS)) is None


@pytest.mark.timeout(600)
def test_what_is_built_ahead_is_found_and_computes(tmp_path: Path) -> None:
    if native.library() is None or not OLD.issubset(processor_flags()):
        pytest.skip("needs a C++ compiler and an x86 processor with AVX2")
    best = next(level for level, needed in LEVELS.items() if needed <= processor_flags())
    made = native.prebuild(tmp_path, [best])
    assert made == list(tmp_path.iterdir())
    found = find(native._sources(), processor_flags(), tmp_path)
    assert found is not None
    a, b = torch.randn(7, 64), torch.randn(7, 64)
    outputs = []
    for path in (native._compiled(native._compiler() or ""), found[1]):
        kernels = native.Kernels(ctypes.CDLL(str(path)))
        fused = torch.cat([a, b], dim=1).bfloat16().contiguous()
        out = torch.empty(7, 64, dtype=torch.bfloat16)
        kernels.df_silu_mul(fused.data_ptr(), out.data_ptr(), 7, 64)
        outputs.append(out)
    assert torch.equal(*outputs)


def test_a_checkout_holds_none() -> None:
    # they would hide what the compiler of this machine makes
    assert not prebuilt.FOLDER.exists()

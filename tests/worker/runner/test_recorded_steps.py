"""On CPUs the decode steps of every family are replayed from a recording; only a benchmark would miss it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_engine, make_submit, run_all, write_tiny_llama
from tiny_families import FAMILIES, write_family
from tiny_gemma3 import write_tiny_gemma3

from decodefleet.kernels import ops
from decodefleet.worker.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(
    not ops.can_record(torch.device("cpu"), torch.bfloat16), reason="no C++ compiler"
)


def recorded(folder: Path, **options: Any) -> list[bool]:
    """Of each recorded shape: whether it can be replayed."""
    engine = make_engine(folder, **options)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    for i in range(2):
        engine.submit(make_submit(str(i), [*range(3, 30 + i)], params))
    run_all(engine)
    graphs = engine._runner.rank._graphs
    assert graphs is not None
    replayed = [own.replay is not None for own in graphs._recordings.values()]
    engine.close()
    return replayed


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    replayed = recorded(write_family(tmp_path, family))
    assert replayed
    assert all(replayed)


def test_gemma3(tmp_path: Path) -> None:
    replayed = recorded(write_tiny_gemma3(tmp_path))
    assert replayed
    assert all(replayed)


@pytest.mark.parametrize("family", ["llama3", "qwen2-window", "gemma3"])
def test_ranks(tmp_path: Path, family: str) -> None:
    """Sums between ranks are native calls as well."""
    folder = write_tiny_gemma3(tmp_path) if family == "gemma3" else write_family(tmp_path, family)
    replayed = recorded(folder, tensor_parallel_size=2)
    assert replayed
    assert all(replayed)


@pytest.mark.parametrize(
    "options",
    [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, {"quantization": "int8"}],
    ids=["int8 cache", "fp8 cache", "int8 weights"],
)
def test_options(tmp_path: Path, options: dict[str, Any]) -> None:
    replayed = recorded(write_tiny_llama(tmp_path), **options)
    assert replayed
    assert all(replayed)

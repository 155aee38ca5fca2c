"""The threads of the CPU kernels: regions of different sizes in turn, on more threads than cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from decodefleet.kernels import ops

ROUNDS = 2000


@pytest.fixture
def crowd() -> Iterator[None]:
    ops.set_cpu_threads(5)
    yield
    ops.set_cpu_threads(1)


def test_every_chunk_runs_once_and_regions_end(crowd: None) -> None:
    """A late helper must find nothing of the region before, and nothing of the next before it begins."""
    torch.manual_seed(0)
    small, large = torch.randn(9, 4096).bfloat16(), torch.randn(40, 4096).bfloat16()
    weight = torch.ones(4096).bfloat16()
    expected = {len(x): ops.add_rms_norm_(x, torch.zeros(x.shape), weight, 1e-5) for x in (small, large)}
    for _ in range(ROUNDS):
        for x in (small, large):
            residual = torch.zeros(x.shape)
            found = ops.add_rms_norm_(x, residual, weight, 1e-5)
            # a chunk that ran twice has added x twice
            assert torch.equal(residual, x.float())
            assert torch.equal(found, expected[len(x)])

"""Kernels are tested at one and at two threads."""

from __future__ import annotations

import pytest

from decodefleet.kernels import ops


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> int:
    ops.set_cpu_threads(request.param)
    return int(request.param)

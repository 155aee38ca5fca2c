"""Runs the cases and makes rows: plain dictionaries for tables and files. Knows nothing of consoles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..aot import OPERATIONS, compile_variants, variants
from .case import Case
from .cases import cases
from .timing import Limits, copies_wanted, measure, measure_limits

LONG_SECONDS = 0.1


@dataclass(frozen=True)
class Timed:
    """One case on one device.

    microseconds: of one call with cold caches. limit: the share of the roofline that this reaches.
    gb_per_s, tflops: of the bytes and operations that there must be. reference, peers: their time over ours.
    error: root mean square of the difference from the reference over that of the reference.
    """

    kernel: str
    variant: str
    target: str
    microseconds: float
    limit: float
    gb_per_s: float
    tflops: float
    error: float
    reference: float
    peers: dict[str, float]


def operations() -> tuple[str, ...]:
    return tuple(OPERATIONS)


def has_gpu() -> bool:
    return torch.cuda.is_available()


def compiled_rows(wanted: Sequence[str]) -> list[dict[str, Any]]:
    """One row per kernel, variant and target, see `aot.Compiled`."""
    return [asdict(row) for row in compile_variants(variants(wanted))]


def bench_rows(
    wanted: Sequence[str], on_case: Callable[[str], None], device: torch.device | None = None
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """(limits of `device`, by default the GPU if there is one; one row per case, see `Timed`)."""
    torch.manual_seed(0)
    device = device or torch.device("cuda" if has_gpu() else "cpu")
    on_case("what the machine allows")
    limits, rows = measure_limits(device), []
    with torch.inference_mode():
        for case in cases(device):
            if case.kernel in wanted:
                on_case(f"{case.kernel}: {case.variant}")
                rows.append(asdict(_time(case, device, limits)))
    return {"gb_per_s": limits.bandwidth / 1e9, "tflops": limits.matmul / 1e12}, rows


def _time(case: Case, device: torch.device, limits: Limits) -> Timed:
    first = case.make()
    # work that takes long is not quicker for a warm cache
    enough = int(LONG_SECONDS / _once(first.run, device))
    copies = max(1, min(copies_wanted(case.moved, device), enough))
    works = [first, *(case.make() for _ in range(copies - 1))]
    error = _error(first.run(), first.reference())
    seconds = measure([work.run for work in works], device)
    return Timed(
        kernel=case.kernel,
        variant=case.variant,
        target=_target(device),
        microseconds=seconds * 1e6,
        limit=limits.seconds(case.moved, case.flops) / seconds,
        gb_per_s=case.moved / seconds / 1e9,
        tflops=case.flops / seconds / 1e12,
        error=error,
        # slow, and reads numbers back to the host, which a graph cannot hold
        reference=_once(first.reference, device) / seconds,
        peers={name: measure([work.peers[name] for work in works], device) / seconds for name in first.peers},
    )


def _once(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call by the host's clock, after another."""
    for _ in range(2):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def _target(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

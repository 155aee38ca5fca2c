"""How long a piece of work takes on a device, with cold caches; and the device's own limits.

On a GPU the repetitions are captured in one graph, so that the host's launch times do not count. Inputs are
rotated through more memory than the caches hold. Knows no case.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import ops
from ..cpu.arena import Arena

# together larger than any last-level cache
COLD_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
ROUNDS = {"cuda": 5, "cpu": 3}
ROUND_SECONDS = 0.02


@dataclass(frozen=True)
class Limits:
    """Measured: bytes per second read or written, and floating-point operations per second in products."""

    bandwidth: float
    matmul: float

    def seconds(self, moved: int, flops: int) -> float:
        """The least time that takes."""
        return max(moved / self.bandwidth, flops / self.matmul)


def copies_wanted(moved: int, device: torch.device) -> int:
    """How many sets of inputs keep the caches cold."""
    return max(1, min(64, COLD_BYTES[device.type] // max(moved, 1)))


def measure(works: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Median seconds of one of `works`, which do the same on inputs of their own."""
    if device.type == "cuda":
        return _measure_cuda(works)
    for work in works:
        work()
    times = [_round(works) for _ in range(ROUNDS["cpu"])]
    return statistics.median(times)


def _round(works: Sequence[Callable[[], object]]) -> float:
    begin, done = time.perf_counter(), 0
    while True:
        for work in works:
            work()
        done += len(works)
        passed = time.perf_counter() - begin
        if passed >= ROUND_SECONDS:
            return passed / done


def _measure_cuda(works: Sequence[Callable[[], object]]) -> float:
    # compiles, and makes what must not be made inside a capture
    for _ in range(2):
        for work in works:
            work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    graph.replay()
    times: list[float] = []
    for _ in range(ROUNDS["cuda"]):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        repeats = max(1, 16 // len(works))
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / (repeats * len(works)))
    return statistics.median(times)


def measure_limits(device: torch.device) -> Limits:
    """The best of what can be had for a plain read or copy, and for a large product."""
    return _gpu_limits(device) if device.type == "cuda" else _cpu_limits(device)


def _gpu_limits(device: torch.device) -> Limits:
    source, target = torch.empty((2, 1 << 30), dtype=torch.uint8, device=device).unbind()
    copy = measure([lambda: target.copy_(source)], device)
    size = 8192
    a, b = torch.randn((2, size, size), device=device).bfloat16().unbind()
    return Limits(2 * source.nbytes / copy, 2 * size**3 / measure([lambda: a @ b], device))


def _cpu_limits(device: torch.device) -> Limits:
    # a sum only reads, as products with weights do; one thread may read faster than two
    numbers = Arena().empty((128 << 20,), torch.float32).fill_(1)
    threads = torch.get_num_threads()
    reads = []
    for count in {1, threads}:
        torch.set_num_threads(count)
        reads.append(measure([lambda: numbers.sum()], device))
    torch.set_num_threads(threads)
    size = 1024
    a, b = torch.randn((2, size, size)).unbind()
    a16, b16 = a.bfloat16(), b.bfloat16()
    prepared = ops.prepare_linear(b16, None, invariant=True)
    # torch's bf16 is slower than its fp32 on processors that its library does not know
    products = (lambda: a @ b, lambda: a16 @ b16, lambda: ops.linear(a16, prepared))
    best = min(measure([product], device) for product in products)
    return Limits(numbers.nbytes / min(reads), 2 * size**3 / best)

"""Counts of values by bucket: what a Prometheus histogram is, without its cost per value.

Pure; knows no metric by name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Distribution:
    """Bounds are inclusive upper ends, ascending; a last bucket without end follows them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """The value below which a share q of all lies, interpolated inside its bucket; None of nothing.

    As Prometheus' histogram_quantile: beyond the last bound it answers that bound.
    """
    total = sum(counts)
    if total <= 0:
        return None
    rank, below = q * total, 0.0
    for number, count in enumerate(counts[: len(bounds)]):
        if count and below + count >= rank:
            low = bounds[number - 1] if number else 0.0
            return low + (bounds[number] - low) * max(0.0, rank - below) / count
        below += count
    return bounds[-1]

"""What came of a simulated run: per request and per token, summed up. Pure bookkeeping."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ..bench.summary import quantile

# of the histogram's buckets
GROWTH = 1.01


class Quantiles(NamedTuple):
    """Milliseconds."""

    p50: float
    p90: float
    p99: float


class Served(NamedTuple):
    """One finished request. ttft, tpot: seconds; tpot is None for answers of one token."""

    at: float
    ttft: float
    tpot: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int

    @property
    def e2e(self) -> float:
        return self.ttft + (self.tpot or 0.0) * (self.output_tokens - 1)


class Gaps:
    """Times between tokens, in buckets of 1 %: there are millions of them."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[math.floor(math.log(max(seconds, 1e-6)) / math.log(GROWTH))] += count

    def quantiles(self) -> Quantiles | None:
        if not self._counts:
            return None
        total, values = sum(self._counts.values()), []
        for share in Quantiles(0.5, 0.9, 0.99):
            below = 0
            for bucket in sorted(self._counts):
                below += self._counts[bucket]
                if below >= share * total:
                    values.append(1000 * GROWTH ** (bucket + 0.5))
                    break
        return Quantiles(*values)


@dataclass
class Recorder:
    """Filled while a run lasts. presence: seconds that requests spent on each worker, summed."""

    served: list[Served] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)
    refused: Counter[str] = field(default_factory=Counter)
    presence: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Objectives(NamedTuple):
    """Seconds that a client accepts: for the first token, and per token after it on average."""

    ttft_s: float
    tpot_s: float

    def met(self, served: Served) -> bool:
        return served.ttft <= self.ttft_s and (served.tpot is None or served.tpot <= self.tpot_s)


@dataclass(frozen=True)
class Summary:
    """One run.

    hit_rate: share of prompt tokens that caches supplied. balance: requests present on the busiest worker,
    averaged over the run, against the mean worker. e2e_mean: milliseconds. attained: share of all
    requests within the objectives.
    gpu_s: seconds that workers were there, each times its GPUs. busy: share of that time spent in steps.
    """

    policy: str
    requests: int
    served: int
    refused: dict[str, int]
    duration_s: float
    ttft: Quantiles | None
    itl: Quantiles | None
    tpot: Quantiles | None
    e2e: Quantiles | None
    e2e_mean: float
    output_tokens_per_s: float
    hit_rate: float
    balance: float
    preemptions: int
    attained: float
    gpu_s: float
    busy: float

    def as_json(self) -> dict[str, Any]:
        quantiles = {
            name: None if value is None else value._asdict() for name, value in self._quantiles().items()
        }
        return asdict(self) | quantiles

    def _quantiles(self) -> dict[str, Quantiles | None]:
        return {"ttft": self.ttft, "itl": self.itl, "tpot": self.tpot, "e2e": self.e2e}


def milliseconds(seconds: Iterable[float]) -> Quantiles | None:
    values = sorted(1000 * value for value in seconds)
    return Quantiles(*(quantile(values, share) for share in (0.5, 0.9, 0.99))) if values else None


def hit_rate(served: Sequence[Served]) -> float:
    return sum(one.cached_tokens for one in served) / max(1, sum(one.prompt_tokens for one in served))


def balance(presence: Sequence[float]) -> float:
    """max / mean; 1 where nothing was there."""
    total = sum(presence)
    return max(presence) * len(presence) / total if total else 1.0

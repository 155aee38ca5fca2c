"""Outcomes as numbers: quantiles of what clients felt, and throughput. Pure.

TTFT: until the first generated text. ITL: between consecutive pieces of text. TPOT: a request's time after
its first token, per further token. Throughput is over the whole run, its ramp up and down included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .load import Run
from .stream import Outcome, read


@dataclass(frozen=True)
class Quantiles:
    """Of durations, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Quantiles | None:
        values = sorted(1000 * value for value in seconds)
        if not values:
            return None
        p50, p95, p99 = (quantile(values, share) for share in (0.50, 0.95, 0.99))
        return cls(math.fsum(values) / len(values), p50, p95, p99, values[-1])


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the closest ranks, as numpy's default."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Summary:
    """One run.

    load: what was asked for, such as "concurrency 8" or "rate 2/s".
    errors: failed requests by kind; they count in nothing but here and in `requests`.
    counted_from: "chunks" when some response came without usage: its tokens are then an estimate.
    client_cpu: cores that this client used on average; the server had to do without them.
    late_p99_ms: how late requests of an open loop were sent; large values mean that the client was the limit.
    """

    load: str
    requests: int
    succeeded: int
    errors: dict[str, int]
    duration_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    counted_from: Literal["usage", "chunks"]
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Quantiles | None
    tpot: Quantiles | None
    itl: Quantiles | None
    e2e: Quantiles | None
    client_cpu: float
    peak_in_flight: int
    late_p99_ms: float | None


def summarize(load: str, run: Run, planned_input: Sequence[int]) -> tuple[Summary, list[Outcome]]:
    """planned_input: mean prompt lengths stand in where a server does not report them."""
    outcomes = [read(exchange) for exchange in run.exchanges]
    good = [outcome for outcome in outcomes if outcome.error is None]
    typical = round(sum(planned_input) / len(planned_input)) if planned_input else 0
    input_tokens = sum(typical if one.prompt_tokens is None else one.prompt_tokens for one in good)
    output_tokens = sum(one.output_tokens for one in good)
    summary = Summary(
        load=load,
        requests=len(outcomes),
        succeeded=len(good),
        errors=dict(Counter(one.error for one in outcomes if one.error is not None).most_common()),
        duration_s=run.duration_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(one.cached_tokens for one in good),
        counted_from="chunks" if any(one.counted_from == "chunks" for one in good) else "usage",
        requests_per_s=len(good) / run.duration_s,
        input_tokens_per_s=input_tokens / run.duration_s,
        output_tokens_per_s=output_tokens / run.duration_s,
        ttft=Quantiles.of(one.ttft for one in good if one.ttft is not None),
        tpot=Quantiles.of(one.tpot for one in good if one.tpot is not None),
        itl=Quantiles.of(gap for one in good for gap in one.gaps),
        e2e=Quantiles.of(one.latency for one in good),
        client_cpu=run.client_cpu_s / run.duration_s,
        peak_in_flight=run.peak_in_flight,
        late_p99_ms=1000 * quantile(sorted(run.late), 0.99) if run.late else None,
    )
    return summary, outcomes

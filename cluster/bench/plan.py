"""The runs that follow from what a benchmark is asked to do.

Knows no server and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .options import BenchError, BenchOptions
from .traces import read_trace
from .workload import Request, Synthetic, poisson

DEFAULT_LENGTH = 128


@dataclass(frozen=True)
class Plan:
    """One run to do: `concurrency` clients, or each request at its own time when that is None."""

    load: str
    requests: list[Request]
    concurrency: int | None = None


def make_plans(options: BenchOptions, seed: str) -> list[Plan]:
    """One run per load. Raises BenchError."""
    if options.trace is not None:
        try:
            requests = read_trace(
                options.trace,
                limit=options.requests,
                speed=options.trace_speed,
                max_input=options.input_len,
                max_output=options.output_len,
            )
        except ValueError as error:
            raise BenchError(str(error)) from error
        return [Plan(f"trace ×{options.trace_speed:g}", requests)]
    shape = _synthetic(options)
    return list(_open_plans(options, shape, seed) if options.rate else _closed_plans(options, shape))


def _synthetic(options: BenchOptions) -> Synthetic:
    try:
        return Synthetic(
            options.input_len or DEFAULT_LENGTH,
            options.output_len or DEFAULT_LENGTH,
            options.prefix_len,
            options.prefix_groups,
        )
    except ValueError as error:
        raise BenchError(str(error)) from error


def _closed_plans(options: BenchOptions, shape: Synthetic) -> Iterator[Plan]:
    for level in options.concurrency:
        count = options.requests or max(16, 4 * level)
        load = f"concurrency {level}"
        yield Plan(load, shape.requests(load, count), level)


def _open_plans(options: BenchOptions, shape: Synthetic, seed: str) -> Iterator[Plan]:
    for rate in options.rate:
        # a minute of traffic unless told otherwise
        count = options.requests or max(16, round(60 * rate))
        load = f"rate {rate:g}/s"
        yield Plan(load, shape.requests(load, count, poisson(rate, seed)))

"""Runs of fleets whose size follows the load, for people (a table, a plot) and for files (JSON)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from .arrivals import Arrival
from .chart import Panel, Series, chart
from .outcome import Quantiles
from .report import as_markdown, grid
from .scaled import ScaledRun

NOTES = (
    "good: within both targets. GPU-hours: from ordering a worker until it has gone. planner: knows what "
    "comes and orders in time. turns: changes of direction in 10 minutes. most: workers asked for. ms: p99."
)
MINUTE_S = 60.0


def table(title: str, runs: Sequence[ScaledRun], width: int) -> Table:
    return grid(title, _lines(runs), NOTES, width)


def markdown(runs: Sequence[ScaledRun]) -> str:
    return as_markdown(_lines(runs))


def document(provenance: dict[str, Any], setup: dict[str, Any], runs: Sequence[ScaledRun]) -> dict[str, Any]:
    """JSON-ready. Durations in ms. timeline: [seconds, workers asked for, those that serve], each change."""
    return {
        "format": 1,
        "kind": "simulate-scaled",
        **provenance,
        "setup": setup,
        "runs": [
            {"name": run.name, "turns": run.turns, **run.summary.as_json(), "timeline": _changes(run)}
            for run in runs
        ],
    }


def plot(arrivals: Sequence[Arrival], runs: Sequence[ScaledRun]) -> str:
    """SVG: the load, the workers asked for, and what share of requests was kept for how much GPU time."""
    minutes = int(arrivals[-1].at // MINUTE_S) + 1
    work = [0.0] * minutes
    for one in arrivals:
        work[int(one.at // MINUTE_S)] += (one.prompt_tokens + one.output_tokens) / MINUTE_S
    load = Series("prompt and answer", [float(minute) for minute in range(minutes)], work, "steps")
    workers = [
        Series(
            run.name,
            [point.at / MINUTE_S for point in run.timeline],
            [float(point.target) for point in run.timeline],
            "steps",
        )
        for run in runs
    ]
    kept = [
        Series(run.name, [run.summary.gpu_s / 3600], [100 * run.summary.attained], "points") for run in runs
    ]
    return chart(
        [
            Panel("load, tokens/s", "minutes", [load]),
            Panel("workers asked for", "minutes", workers),
            Panel("% of requests within both objectives", "GPU-hours", kept),
        ]
    )


def _lines(runs: Sequence[ScaledRun]) -> list[list[str]]:
    base = next((run.summary.gpu_s for run in runs if run.name == "planner"), None)
    columns: list[tuple[str, Callable[[ScaledRun], str]]] = [
        ("workers", lambda run: run.name),
        ("good", lambda run: f"{run.summary.attained:.2%}"),
        ("GPU-hours", lambda run: f"{run.summary.gpu_s / 3600:.1f}"),
        ("of planner", lambda run: "–" if base is None else f"{run.summary.gpu_s / base:.2f}"),
        ("TTFT ms", lambda run: _p99(run.summary.ttft)),
        ("TPOT ms", lambda run: _p99(run.summary.tpot)),
        ("turns", lambda run: f"{run.turns:.1f}"),
        ("most", lambda run: str(run.most)),
        ("refused", lambda run: str(sum(run.summary.refused.values()))),
    ]
    return [[name, *(cell(run) for run in runs)] for name, cell in columns]


def _p99(values: Quantiles | None) -> str:
    return "–" if values is None else f"{values.p99:.0f}"


def _changes(run: ScaledRun) -> list[list[float]]:
    found: list[list[float]] = []
    for point in run.timeline:
        if not found or found[-1][1:] != [point.target, point.workers]:
            found.append([point.at, point.target, point.workers])
    return found

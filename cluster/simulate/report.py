"""A comparison for people (a table, a plot) and for files (JSON)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .chart import Panel, Series, chart
from .compare import Comparison
from .outcome import Quantiles, Summary

# between columns
GAP = 3
NOTES = (
    "ms: p50 / p90 / p99. cached: share of prompt tokens that caches supplied, and that against the oracle's "
    "(one LRU over all workers' memory) and against a cache without end. balance: requests present on the "
    "busiest worker against the mean. good: within both targets."
)


def table(title: str, found: Comparison, width: int) -> Table:
    return grid(title, _lines(found), NOTES, width)


def markdown(found: Comparison) -> str:
    """The same table for a file."""
    return as_markdown(_lines(found))


def grid(title: str, lines: Sequence[Sequence[str]], notes: str, width: int) -> Table:
    """lines: a heading and a cell per run. One row per run, or one column where a terminal of `width`
    characters is too narrow for rows."""
    needed = sum(max(map(len, line)) + GAP for line in lines)
    head, *rows = zip(*lines, strict=True) if needed <= width else lines
    shown = Table(title=title, title_justify="left", caption=notes, caption_justify="left", box=SIMPLE_HEAD)
    for name in head:
        shown.add_column(name, justify="left" if name == lines[0][0] else "right")
    for row in rows:
        shown.add_row(*row)
    return shown


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rows = zip(*lines, strict=True)
    written = ["| " + " | ".join(name.replace("\n", " ") for name in head) + " |", "|---" * len(head) + "|"]
    written += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(written) + "\n"


def document(provenance: dict[str, Any], setup: dict[str, Any], found: Comparison) -> dict[str, Any]:
    """JSON-ready. Durations in ms."""
    return {
        "format": 1,
        "kind": "simulate",
        **provenance,
        "setup": setup,
        "oracle_hit_rate": found.oracle,
        "endless_hit_rate": found.endless,
        "runs": [run.as_json() for run in found.runs],
    }


def plot(found: Comparison) -> str:
    """SVG: hit rate against p90 TTFT, one point per run, and the quantiles of TTFT and ITL."""
    return chart(
        [
            Panel(
                "p90 TTFT, s",
                "prompt tokens found in a cache, %",
                [
                    Series(run.policy, [100 * run.hit_rate], [run.ttft.p90 / 1000], "points")
                    for run in found.runs
                    if run.ttft is not None
                ],
            ),
            _quantiles("TTFT, ms", {run.policy: run.ttft for run in found.runs}),
            _quantiles("time between tokens, ms", {run.policy: run.itl for run in found.runs}),
        ]
    )


def _quantiles(title: str, values: dict[str, Quantiles | None]) -> Panel:
    shares = [50.0, 90.0, 99.0]
    return Panel(
        title,
        "percentile",
        [Series(name, shares, list(value)) for name, value in values.items() if value is not None],
        log=True,
        from_zero=False,
    )


def _lines(found: Comparison) -> list[list[str]]:
    columns: list[tuple[str, Callable[[Summary], str]]] = [
        ("policy", lambda run: run.policy),
        ("TTFT ms", lambda run: _cell(run.ttft)),
        ("ITL ms", lambda run: _cell(run.itl)),
        ("out tok/s", lambda run: f"{run.output_tokens_per_s:,.0f}"),
        ("cached", lambda run: f"{run.hit_rate:.1%}"),
        ("of oracle", lambda run: _share(run.hit_rate, found.oracle)),
        ("of endless", lambda run: _share(run.hit_rate, found.endless)),
        ("balance", lambda run: f"{run.balance:.2f}"),
        ("good", lambda run: f"{run.attained:.1%}"),
        ("refused", lambda run: str(sum(run.refused.values()))),
        ("preempted", lambda run: str(run.preemptions)),
    ]
    return [[name, *(cell(run) for run in found.runs)] for name, cell in columns]


def _cell(values: Quantiles | None) -> str:
    return "–" if values is None else " / ".join(_number(value) for value in values)


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"

"""Results for people (a table) and for files (JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .stream import Outcome
from .summary import Quantiles, Summary

FORMAT = 1


def table(title: str, summaries: Sequence[Summary]) -> Table:
    """One column per run, so that it fits a terminal; durations in ms."""
    caption = "\n".join(_notes(summaries))
    grid = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    grid.add_column(style="bold")
    for summary in summaries:
        grid.add_column(summary.load, justify="right")
    for label, cells in _rows(summaries):
        grid.add_row(label, *cells)
    return grid


def document(
    provenance: dict[str, Any], setup: dict[str, Any], runs: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The whole result. `runs` come from `run_document`."""
    return {"format": FORMAT, "kind": "bench serve", **provenance, "setup": setup, "runs": list(runs)}


def run_document(summary: Summary, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One run: its summary, and one line per request without the single gaps."""
    requests = [
        {
            "ttft_ms": _ms(one.ttft),
            "tpot_ms": _ms(one.tpot),
            "e2e_ms": _ms(one.latency),
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "cached_tokens": one.cached_tokens,
            "error": one.error,
        }
        for one in outcomes
    ]
    return {**asdict(summary), "per_request": requests}


def _rows(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    rows = [
        ("requests ok", [f"{one.succeeded} of {one.requests}" for one in summaries]),
        ("output tok/s", [f"{one.output_tokens_per_s:.1f}" for one in summaries]),
        ("input tok/s", [f"{one.input_tokens_per_s:.1f}" for one in summaries]),
        ("requests/s", [f"{one.requests_per_s:.2f}" for one in summaries]),
        ("TTFT ms", [_cell(one.ttft) for one in summaries]),
        ("TPOT ms", [_cell(one.tpot) for one in summaries]),
        ("ITL ms", [_cell(one.itl) for one in summaries]),
        ("e2e ms", [_cell(one.e2e) for one in summaries]),
        ("cached prompt", [_share(one.cached_tokens, one.input_tokens) for one in summaries]),
        ("client CPU", [f"{100 * one.client_cpu:.1f} %" for one in summaries]),
    ]
    if any(one.late_p99_ms is not None for one in summaries):
        rows.append(("most in flight", [str(one.peak_in_flight) for one in summaries]))
        rows.append(("late p99 ms", [_number(one.late_p99_ms) for one in summaries]))
    if any(one.errors for one in summaries):
        rows.append(("errors", [_errors(one) for one in summaries]))
    return rows


def _notes(summaries: Sequence[Summary]) -> list[str]:
    notes = ["ms: p50 / p95 / p99; client CPU: of one core"]
    if any(one.counted_from == "chunks" for one in summaries):
        notes.append("The server sent no usage: tokens are counted by chunks, an estimate.")
    return notes


def _errors(summary: Summary) -> str:
    return "\n".join(f"{count} {kind}" for kind, count in summary.errors.items())


def _cell(values: Quantiles | None) -> str:
    return "–" if values is None else f"{_number(values.p50)} / {_number(values.p95)} / {_number(values.p99)}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)

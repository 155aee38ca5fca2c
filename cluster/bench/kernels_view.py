"""`decodefleet bench kernels` on the terminal: tables of rows that others made. Knows no kernel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import JustifyMethod
from rich.table import Table

from .options import BenchError

Row = Mapping[str, Any]


def compiled_table(rows: Sequence[Row]) -> Table:
    """One line per kernel and variant, one column per target: registers, shared memory, occupancy, spills."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    table = Table(title="compiled ahead of time: registers, shared KiB, occupancy; spills in red")
    for name in ("kernel", "variant", *targets):
        table.add_column(name, justify="right" if name in targets else "left", no_wrap=True)
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        lines.setdefault((row["kernel"], row["variant"]), {})[row["target"]] = _compiled_cell(row)
    for (kernel, variant), cells in lines.items():
        table.add_row(kernel, variant, *(cells.get(target, "") for target in targets))
    return table


def _compiled_cell(row: Row) -> str:
    cell = f"{row['registers']} {row['shared'] / 1024:.0f}K {row['occupancy']:.0%}"
    return f"{cell} [red]{row['spills']}[/]" if row["spills"] else cell


def timed_table(limits: Mapping[str, float], rows: Sequence[Row]) -> Table:
    """One line per case, beside what the machine allows."""
    title = f"limits measured in this run: {limits['gb_per_s']:.1f} GB/s, {limits['tflops']:.3g} TFLOP/s"
    table = Table(title=title)
    for name in ("kernel", "variant", "µs", "of limit", "GB/s", "TFLOP/s", "reference", "peers", "error"):
        justify: JustifyMethod = "left" if name in ("kernel", "variant", "peers") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        peers = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in row["peers"].items())
        table.add_row(
            row["kernel"],
            row["variant"],
            f"{row['microseconds']:,.1f}",
            f"{row['limit']:.0%}",
            f"{row['gb_per_s']:,.1f}",
            f"{row['tflops']:.3g}",
            f"{row['reference']:.2f}x",
            peers,
            f"{row['error']:.1e}",
        )
    return table


def write_rows(path: Path, rows: object) -> None:
    """Raises BenchError."""
    try:
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error

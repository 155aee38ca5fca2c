"""`decodefleet simulate` on the command line: progress, the table, the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..bench.machine import provenance
from . import report, scaled_report
from .compare import Observer, compare
from .options import SimulateError, SimulateOptions
from .scaled import compare_scaled

# of requests: a bar does not move for each
STEP = 50


def simulate(values: dict[str, Any], console: Console) -> None:
    """Runs what `values` (flags by field name, None for not given) ask for. Raises SimulateError."""
    options = _options({name: value for name, value in values.items() if value is not None})
    for path in (options.output, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise SimulateError(f"there is no folder {path.parent} to write {path.name} to")
    if not console.is_terminal:
        # a file has room for whole lines
        console.width = 160
    with _bars(console) as observe:
        told = (_compare if options.max_workers is None else _scale)(options, observe, console.width)
    console.print(told.table)
    if options.output is not None:
        _write(options.output, json.dumps(told.document, indent=1) + "\n")
    if options.plot is not None:
        _write(options.plot, told.plot)


class _Told(NamedTuple):
    table: Table
    document: dict[str, Any]
    plot: str


def _compare(options: SimulateOptions, observe: Observer, width: int) -> _Told:
    """Placement policies on a fleet of one size."""
    found = compare(options, observe)
    title = _title(options, found.requests, f"{options.workers} workers")
    return _Told(
        report.table(title, found, width),
        report.document(provenance(), _setup(options), found),
        report.plot(found),
    )


def _scale(options: SimulateOptions, observe: Observer, width: int) -> _Told:
    """A fleet whose size follows the load."""
    arrivals, runs = compare_scaled(options, observe)
    title = _title(options, len(arrivals), f"{options.min_workers} to {options.max_workers} workers")
    return _Told(
        scaled_report.table(title, runs, width),
        scaled_report.document(provenance(), _setup(options), runs),
        scaled_report.plot(arrivals, runs),
    )


def _title(options: SimulateOptions, requests: int, fleet: str) -> str:
    gpus = f"{options.tensor_parallel_size} × {options.gpu}"
    return f"{requests:,} requests of {options.trace.name} on {fleet} ({options.model}, {gpus})"


def _setup(options: SimulateOptions) -> dict[str, Any]:
    return options.model_dump(mode="json", exclude={"output", "plot"}) | {"trace": options.trace.name}


@contextmanager
def _bars(console: Console) -> Iterator[Observer]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:

        def observe(name: str, total: int) -> Any:
            task = progress.add_task(name, total=total)
            ended = 0

            def count(more: int) -> None:
                nonlocal ended
                ended += more
                if ended % STEP == 0 or ended == total:
                    progress.update(task, completed=ended)

            return count

        yield observe


def _options(given: dict[str, Any]) -> SimulateOptions:
    try:
        return SimulateOptions.model_validate(given)
    except ValidationError as error:
        lines = []
        for detail in error.errors(include_input=False):
            if not detail["loc"]:
                lines.append(str(detail["ctx"]["error"]))
                continue
            flag = str(detail["loc"][0]).replace("_", "-")
            missing = detail["type"] == "missing"
            lines.append(f"--{flag}: " + ("has to be given" if missing else detail["msg"]))
        raise SimulateError("\n".join(lines)) from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SimulateError(f"cannot write {path}: {error.strerror}") from error

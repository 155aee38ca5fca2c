"""`decodefleet simulate` on the command line: progress, the table, the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..bench.machine import provenance
from .compare import Observer, compare
from .options import SimulateError, SimulateOptions
from .report import document, plot, table

# of requests: a bar does not move for each
STEP = 50


def simulate(values: dict[str, Any], console: Console) -> None:
    """Runs what `values` (flags by field name, None for not given) ask for. Raises SimulateError."""
    options = _options({name: value for name, value in values.items() if value is not None})
    for path in (options.output, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise SimulateError(f"there is no folder {path.parent} to write {path.name} to")
    with _bars(console) as observe:
        found = compare(options, observe)
    if not console.is_terminal:
        # a file has room for whole lines
        console.width = 160
    console.print(table(_title(options, found.requests), found, console.width))
    if options.output is not None:
        setup = options.model_dump(mode="json", exclude={"output", "plot"}) | {"trace": options.trace.name}
        _write(options.output, json.dumps(document(provenance(), setup, found), indent=1) + "\n")
    if options.plot is not None:
        _write(options.plot, plot(found))


def _title(options: SimulateOptions, requests: int) -> str:
    gpus = f"{options.tensor_parallel_size} × {options.gpu}"
    on = f"{options.workers} workers ({options.model}, {gpus})"
    return f"{requests:,} requests of {options.trace.name} on {on}"


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
            flag = str(detail["loc"][0]).replace("_", "-")
            missing = detail["type"] == "missing"
            lines.append(f"--{flag}: " + ("has to be given" if missing else detail["msg"]))
        raise SimulateError("\n".join(lines)) from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SimulateError(f"cannot write {path}: {error.strerror}") from error

"""`decodefleet bench serve` on the command line: progress, the table, the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from .bench import Result, run
from .machine import provenance
from .options import BenchError, BenchOptions
from .progress import progress
from .report import document, run_document, table

INTERRUPTED = 130


def bench_serve(values: dict[str, Any], console: Console) -> int:
    """Runs the benchmark that `values` (flags by field name, None for not given) ask for; an exit status.

    Raises BenchError.
    """
    options = _options({name: value for name, value in values.items() if value is not None})
    if options.output is not None:
        # found out before the benchmark rather than after it
        _writable(options.output)
    with progress(console) as observe:
        result = run(options, observe)
    title = options.label or f"{result.model} at {options.url}"
    console.print(table(title, [summary for summary, _ in result.runs]))
    if not result.complete:
        console.print("[yellow]interrupted: the run that was under way is left out, and those after it[/]")
    console.print(f"[dim]the same prompts again: --seed {result.seed}[/]")
    if options.output is not None:
        text = json.dumps(_document(options, result), indent=1)
        options.output.write_text(text + "\n", encoding="utf-8")
        console.print(f"written to {options.output}")
    if not result.complete:
        return INTERRUPTED
    return 0 if all(summary.succeeded for summary, _ in result.runs) else 1


def _options(given: dict[str, Any]) -> BenchOptions:
    try:
        return BenchOptions.model_validate(given)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors(include_input=False)]
        # without its cause, whose text shows the values, the API key among them
        raise BenchError("\n".join(lines)) from None


def _explain(detail: Any) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    return f"--{detail['loc'][0].replace('_', '-')}: {message}" if detail["loc"] else str(message)


def _writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--output: cannot make {path.parent}: {error.strerror}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BenchError(f"--output: cannot write {path}")


def _document(options: BenchOptions, result: Result) -> dict[str, Any]:
    setup = options.model_dump(mode="json", exclude={"api_key", "output"})
    setup |= {"model": result.model, "seed": result.seed, "trace": options.trace and options.trace.name}
    runs = [run_document(summary, outcomes) for summary, outcomes in result.runs]
    return document(provenance(), setup, runs)

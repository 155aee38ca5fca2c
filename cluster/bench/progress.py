"""Progress bars of a benchmark. Drawn twice a second at most: the machine belongs to the server."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .http import Exchange
from .plan import Plan


class Bars:
    """An observer of `run_bench`; one bar per run."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, refresh_per_second=2, transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, plan: Plan, exchange: Exchange | None) -> None:
        if exchange is None:
            self._task = self._progress.add_task(plan.load, total=len(plan.requests))
        elif self._task is not None:
            self._progress.advance(self._task)

"""Progress of a benchmark. Shown twice a second at most: the machine belongs to the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .bench import Observer
from .http import Exchange
from .plan import Plan

LINE_EVERY_S = 5.0


def progress(console: Console) -> AbstractContextManager[Observer]:
    """Bars in a terminal; elsewhere, as in a log, a line now and then."""
    return Bars(console) if console.is_terminal else Lines(console)


class Bars:
    """An observer of `run_bench`; one bar per run, and before them one without an end, for the warm-up."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, refresh_per_second=2, transient=True)
        self._task: TaskID | None = None
        self._warm_up: TaskID | None = self._progress.add_task("warming up", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, plan: Plan, exchange: Exchange | None) -> None:
        if self._warm_up is not None:
            self._progress.remove_task(self._warm_up)
            self._warm_up = None
        if exchange is None:
            self._task = self._progress.add_task(plan.load, total=len(plan.requests))
        elif self._task is not None:
            self._progress.advance(self._task)


class Lines:
    """An observer of `run_bench`; a line when a run starts, when it ends, and every few seconds between."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._began = self._said = 0.0
        self._done = self._failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __call__(self, plan: Plan, exchange: Exchange | None) -> None:
        now = self._clock()
        if exchange is None:
            self._began, self._done, self._failed = now, 0, 0
        else:
            self._done += 1
            self._failed += exchange.failure is not None or exchange.status != 200
        due = self._done in (0, len(plan.requests)) or now - self._said >= LINE_EVERY_S
        if due:
            self._said = now
            failed = f", {self._failed} failed" if self._failed else ""
            self._console.print(
                f"{plan.load}: {self._done} of {len(plan.requests)} requests{failed},"
                f" {now - self._began:.0f} s",
                highlight=False,
            )

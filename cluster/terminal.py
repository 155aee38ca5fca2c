"""What commands show in a terminal: progress of work on model files, and what went wrong."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text


class Bars:
    """Bars that are gone from the terminal when they end, in whichever thread that is."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Returns when they are gone, even where another thread is just ending them."""
        # it prints an empty line each time where there is no terminal
        if self._progress.live.is_started:
            self._progress.stop()


class FileProgress(Bars):
    """Shows the stages of finding, fetching and converting a model: a `ProgressSink`."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        super().__init__(Progress(*columns, console=console, transient=True))
        self._task: TaskID | None = None

    def start(self, stage: str, total: int | None) -> None:
        self.done()
        self._task = self._progress.add_task(stage, total=total)

    def advance(self, n: int) -> None:
        if self._task is not None:
            self._progress.advance(self._task, n)

    def done(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


def print_error(console: Console, message: str) -> None:
    """The message as it is, in red, wherever the terminal wraps it."""
    console.print(Text("error: ", style="bold red") + Text(message, style="red"))

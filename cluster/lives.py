"""One life of the server after the other: what was up once is started again, until somebody stops it.

A start that fails is final before that, and says why: somebody sits there, or a supervisor that knows what to
do. Afterwards nobody does, and what made it fail passes (a slow machine, a port or memory that is not free
yet), so it is tried again, less and less often. Knows nothing of what a life does but its exit code and `UP`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from .health import PREFIX, RUNS, forget_address
from .processes import Guardian

STOPPED = 0
FAILED = 1
STOPPED_AT_ONCE = 130
# it would fail again: what it was told is wrong
HOPELESS = 78
# a life leaves this in its folder once it serves and is one to be started again
UP = "up"
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0

# in a child of its own: gets an empty folder, returns the exit code
Life = Callable[[Path], int]


class Lives:
    """`run` once. Only the folder of the last life that failed stays."""

    def __init__(self, life: Life, console: Console, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._life = life
        self._console = console
        self._first_pause_s = first_pause_s
        self._guardian = Guardian()
        self._failed: Path | None = None

    def run(self) -> int:
        """Until a life ends as it was told to, or starting again is of no use; returns the exit code."""
        was_up, failures = False, 0
        while True:
            code, came_up = self._live()
            was_up = was_up or came_up
            failures = 0 if came_up else failures + 1
            if code in (STOPPED, STOPPED_AT_ONCE):
                if came_up:
                    self._forget_failed()
                return code
            if self._guardian.is_told:
                return STOPPED
            if code == HOPELESS or not was_up:
                return FAILED if code == HOPELESS else code
            pause_s = min(self._first_pause_s * 2 ** (failures - 1), MAX_PAUSE_S) if failures else 0.0
            self._console.print("starting again" + (f" in {pause_s:g} s" if pause_s else ""))
            if not self._guardian.pause(pause_s):
                return STOPPED

    def _live(self) -> tuple[int, bool]:
        # short, and not below TMPDIR: the paths of Ray's sockets are limited to 107 characters
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=RUNS))
        code = self._guardian.run(lambda: self._life(folder))
        forget_address(folder)
        # one that ended at once had no time to show it again
        self._console.show_cursor()
        came_up = (folder / UP).exists()
        if code not in (STOPPED, STOPPED_AT_ONCE, FAILED, HOPELESS):
            self._console.print(f"the server's process ended with {code}")
        if code in (STOPPED, STOPPED_AT_ONCE) or not (folder / "ray").exists():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self._forget_failed()
            self._failed = folder
            self._console.print(f"logs are in {folder}", soft_wrap=True, highlight=False)
        return code, came_up

    def _forget_failed(self) -> None:
        if self._failed is not None:
            shutil.rmtree(self._failed, ignore_errors=True)
            self._failed = None

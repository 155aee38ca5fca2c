"""One life of the server after the other: what was up once is started again, until somebody stops it.

A start that fails is final before that, and says why: somebody sits there, or a supervisor that knows what to
do. Afterwards nobody does, and what made it fail passes (a slow machine, a port or memory that is not free
yet), so it is tried again, the less often the less it has served. Knows nothing of what a life does but its
exit code and `UP`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from .health import PREFIX, RUNS, forget_address
from .processes import Guardian
from .terminal import print_error

STOPPED = 0
FAILED = 1
STOPPED_AT_ONCE = 130
# a life leaves this in its folder once it serves and is one to be started again
UP = "up"
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
# who served for so long did not come up to be lost again
STEADY_S = 60.0

# in a child of its own: gets an empty folder, returns the exit code
Life = Callable[[Path], int]


class Lives:
    """`run` once. Only the folder of the last life that failed stays."""

    def __init__(
        self, life: Life, console: Console, first_pause_s: float = FIRST_PAUSE_S, steady_s: float = STEADY_S
    ) -> None:
        self._life = life
        self._console = console
        self._first_pause_s = first_pause_s
        self._steady_s = steady_s
        self._guardian = Guardian()
        self._failed: Path | None = None

    def run(self) -> int:
        """Until a life ends as it was told to, or none has served yet; returns the exit code."""
        was_up, pause_s = False, 0.0
        while True:
            code, served_s = self._live()
            was_up = was_up or served_s is not None
            if code in (STOPPED, STOPPED_AT_ONCE):
                if served_s is not None:
                    self._forget_failed()
                return code
            if self._guardian.is_told:
                return STOPPED
            if not was_up:
                return code
            if served_s is not None and served_s >= self._steady_s:
                pause_s = 0.0
            self._console.print("starting again" + (f" in {pause_s:g} s" if pause_s else ""))
            if not self._guardian.pause(pause_s):
                return STOPPED
            pause_s = min(2 * pause_s or self._first_pause_s, MAX_PAUSE_S)

    def _live(self) -> tuple[int, float | None]:
        """Its exit code, and for how long it served; None where it never did."""
        try:
            # short, and not below TMPDIR: the paths of Ray's sockets are limited to 107 characters
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=RUNS))
            code = self._guardian.run(lambda: self._life(folder))
        except OSError as error:
            print_error(self._console, f"the server's process cannot be started: {error}")
            return FAILED, None
        forget_address(folder)
        # one that ended at once had no time to show it again
        self._console.show_cursor()
        up = folder / UP
        served_s = time.time() - up.stat().st_mtime if up.exists() else None
        if code not in (STOPPED, STOPPED_AT_ONCE, FAILED) and not self._guardian.is_told:
            self._console.print(f"the server's process ended with {code}")
        if code in (STOPPED, STOPPED_AT_ONCE) or not (folder / "ray").exists():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self._forget_failed()
            self._failed = folder
            self._console.print(f"logs are in {folder}", soft_wrap=True, highlight=False)
        return code, served_s

    def _forget_failed(self) -> None:
        if self._failed is not None:
            shutil.rmtree(self._failed, ignore_errors=True)
            self._failed = None

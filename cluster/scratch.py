"""Folders of processes: gone with their owner's `close`, or swept up by the next one where it was killed.

Each is held by a lock for as long as its owner lives. By default paths are short enough for sockets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_YOUNG_S = 60.0
_LONGEST = 60


class ScratchFolder:
    """A new folder in `parent`, by default where temporary files go; its owner alone can read it."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = _short_temp() if parent is None else parent
        _remove_stale(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = (self.path / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _short_temp() -> Path:
    """A folder in which a socket's path stays under the 108 bytes that the kernel takes."""
    temp = tempfile.gettempdir()
    return Path(temp if len(temp) < _LONGEST else "/tmp")


def _remove_stale(parent: Path, prefix: str) -> None:
    """Folders of owners that were killed: nobody holds their lock."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = folder.stat()
            # one that is being made has no lock yet
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < _YOUNG_S:
                continue
            with (folder / "lock").open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)

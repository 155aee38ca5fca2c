"""How fast memory and a folder's disk give back what was put there; short enough for `plan`. Torch-free.

An engine measures its own links when it starts (`kv/tiers/opening.py`); this is for planning one.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

SIZE = 32 << 20
PIECE = 2 << 20
TRIES = 3


def memory_bytes_per_s() -> float:
    """Of copies of 32 MiB within memory, the best of three."""
    source, target = np.ones(SIZE, dtype=np.uint8), np.empty(SIZE, dtype=np.uint8)
    return _best(lambda: np.copyto(target, source))


def disk_bytes_per_s(folder: Path) -> float:
    """Of reads of 2 MiB one after the other, past the page cache where the filesystem allows it.

    folder: it or its nearest parent that exists. Raises OSError where no file can be had there.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    with tempfile.NamedTemporaryFile(dir=existing) as file, mmap.mmap(-1, PIECE) as piece:
        fd = _open(file.name)
        try:
            os.posix_fallocate(fd, 0, SIZE)
            for offset in range(0, SIZE, PIECE):
                os.pwritev(fd, [piece], offset)
            return _best(lambda: [os.preadv(fd, [piece], offset) for offset in range(0, SIZE, PIECE)])
        finally:
            os.close(fd)


def _open(name: str) -> int:
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return os.open(name, os.O_RDWR)


def _best(move: Callable[[], object]) -> float:
    def seconds() -> float:
        began = time.perf_counter()
        move()
        return time.perf_counter() - began

    return SIZE / min(seconds() for _ in range(TRIES))

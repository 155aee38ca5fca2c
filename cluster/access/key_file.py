"""A file of API keys, changed while routers read it: lines are added, listed, and taken out."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from .keyring import UnusableKeys
from .keys import Grant, InvalidKeyLine, digest_of, new_key, parse, to_line

Entry = tuple[bytes, Grant]


def add(file: Path, grant: Grant) -> str:
    """Appends a line for a new key; answers the key, which nobody can find out afterwards.

    Raises UnusableKeys.
    """
    key = new_key()
    lines = _lines(file) if file.exists() else []
    _write(file, [*lines, to_line(key, grant)])
    return key


def entries(file: Path) -> list[Entry]:
    """Raises UnusableKeys."""
    return [entry for line in _lines(file) if (entry := _entry(file, line)) is not None]


def revoke(file: Path, what: str) -> int:
    """Takes keys out; answers how many. Comments stay. Raises UnusableKeys.

    what: the key itself, the beginning of its hash (8 digits at least), or a tenant.
    """
    kept, gone = [], 0
    for line in _lines(file):
        entry = _entry(file, line)
        if entry is not None and _is_meant(entry, what):
            gone += 1
        else:
            kept.append(line)
    if gone:
        _write(file, kept)
    return gone


def _is_meant(entry: Entry, what: str) -> bool:
    digest, grant = entry
    beginning = what.removeprefix("sha256:")
    by_hash = len(beginning) >= 8 and digest.hex().startswith(beginning)
    return digest == digest_of(what) or by_hash or grant.tenant == what


def _entry(file: Path, line: str) -> Entry | None:
    if not line.strip() or line.lstrip().startswith("#"):
        return None
    try:
        return parse(line)
    except InvalidKeyLine as error:
        raise UnusableKeys(f"{file}: {error}") from None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableKeys(f"cannot read {file}: {error}") from error


def _write(file: Path, lines: list[str]) -> None:
    """All or nothing, for routers may be reading it. Raises UnusableKeys.

    Owner, mode, and a link to it stay as they are; a new file is its owner's only.
    """
    # beside what a link leads to: only within a folder a file is replaced at once
    target = file.resolve()
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as made:
                made.writelines(f"{line}\n" for line in lines)
                _resemble(descriptor, target)
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except OSError as error:
        raise UnusableKeys(f"cannot write {file}: {error.strerror}") from error


def _resemble(descriptor: int, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        before = target.stat()
        os.fchown(descriptor, before.st_uid, before.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))

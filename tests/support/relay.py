"""A network in front of one endpoint that can be cut and healed: while it is cut, nothing arrives and nothing
is reset. In a thread of its own, for tests with and without a loop."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from urllib.parse import urlsplit


class Relay:
    def __init__(self, endpoint: str) -> None:
        target = urlsplit(endpoint)
        self._target = (target.hostname or "", target.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._other: dict[socket.socket, socket.socket] = {}
        self._cut = self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        self._cut = True
        os.eventfd_write(self._wake, 1)

    def heal(self) -> None:
        self._cut = False
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        with self._listener, contextlib.ExitStack() as stack:
            while not self._closing:
                self._move(stack)

    def _move(self, stack: contextlib.ExitStack) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            # whoever connects while it is cut waits in the backlog
            for source in () if self._cut else (self._listener, *self._other):
                selector.register(source, selectors.EVENT_READ)
            for key, _ in selector.select():
                if key.fileobj is self._listener:
                    self._accept(stack)
                elif key.fileobj == self._wake:
                    os.eventfd_read(self._wake)
                elif isinstance(key.fileobj, socket.socket):
                    self._forward(key.fileobj)

    def _accept(self, stack: contextlib.ExitStack) -> None:
        near = stack.enter_context(self._listener.accept()[0])
        far = stack.enter_context(socket.create_connection(self._target))
        self._other |= {near: far, far: near}

    def _forward(self, source: socket.socket) -> None:
        sink = self._other.get(source)
        if sink is None:
            return
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(65536)
            sink.sendall(data)
        if not data:
            for end in (source, sink):
                del self._other[end]
                end.close()

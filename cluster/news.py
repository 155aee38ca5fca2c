"""News of workers that start, on their way to the launcher that shows them.

One PUSH socket per worker, one PULL socket at the launcher, over a file socket: only a launcher on the same
machine listens, and nobody ever waits for it.
"""

from __future__ import annotations

import contextlib

import msgspec
import zmq

from decodefleet.worker.protocol import Failed, Loading, Ready

LINGER_MS = 500


class WorkerNews(msgspec.Struct, frozen=True):
    worker_id: str
    news: Loading | Ready | Failed


class NewsSender:
    """Never blocks; news that nobody takes is dropped. Must be used by one thread."""

    def __init__(self, endpoint: str, worker_id: str) -> None:
        self._worker_id = worker_id
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.linger = LINGER_MS
        self._socket.connect(endpoint)

    def send(self, news: Loading | Ready | Failed) -> None:
        frame = msgspec.msgpack.encode(WorkerNews(self._worker_id, news))
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy()


class NewsReceiver:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.bind(endpoint)

    def receive(self, timeout_s: float) -> list[WorkerNews]:
        """What has come, after waiting up to `timeout_s` for the first."""
        news = []
        timeout_ms = int(1000 * timeout_s)
        while self._socket.poll(timeout_ms):
            news.append(msgspec.msgpack.decode(self._socket.recv(), type=WorkerNews))
            timeout_ms = 0
        return news

    def close(self) -> None:
        self._context.destroy(linger=0)

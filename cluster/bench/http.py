"""A lean HTTP/1.1 client for load generation, on asyncio and httptools.

It shares the machine with the server that it measures, so the hot path stamps each piece of a body, keeps it,
and does nothing else. What the pieces mean is found out after the last one, by `stream.py`. Never raises for
what a server does: every request ends in an `Exchange`.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Target:
    """Where a server listens; `prefix` goes before every path."""

    host: str
    port: int
    prefix: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Target:
        """Raises ValueError when the URL is not http(s)://host[:port][/prefix]."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"expected http(s)://host[:port], not {url!r}")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), prefix, tls)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(slots=True)
class Exchange:
    """One request and what came back. Times are `time.perf_counter()` seconds.

    pieces: (arrival, bytes) of the body as they came in, chunked encoding removed.
    failure: "connect", "disconnect", "timeout" or "bad http"; None when the response is complete.
    """

    started: float = 0.0
    ended: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class HttpClient:
    """Keeps idle connections for reuse; as many are open as requests are in flight."""

    def __init__(
        self, target: Target, headers: Mapping[str, str], *, timeout_s: float, keep_alive: bool = True
    ) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._keep_alive = keep_alive
        self._idle: deque[_Connection] = deque()
        self._tls = ssl.create_default_context() if target.tls else None
        lines = {"Host": target.authority, "Accept": "*/*", "Content-Type": "application/json", **headers}
        if not keep_alive:
            lines["Connection"] = "close"
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def request(self, method: str, path: str, body: bytes = b"") -> Exchange:
        start = f"{method} {self._target.prefix}{path} HTTP/1.1\r\n"
        frame = f"{start}{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        while True:
            exchange = Exchange(started=time.perf_counter())
            reused = await self._attempt(frame, exchange)
            # a server may close an idle connection just as it is taken: that request never reached it
            if exchange.failure == "disconnect" and reused and not exchange.status:
                continue
            return exchange

    async def _attempt(self, frame: bytes, exchange: Exchange) -> bool:
        """Fills `exchange`; true when the connection had served a request before."""
        connection = self._take()
        reused = connection is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = connection or await self._connect()
                await connection.exchange(frame, exchange)
        except TimeoutError:
            exchange.failure = "timeout" if connection else "connect"
        except OSError:
            exchange.failure = "connect"
        except asyncio.CancelledError:
            if connection is not None:
                connection.close()
            raise
        exchange.ended = time.perf_counter()
        if connection is not None:
            self._give(connection)
        return reused

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        # transports close in the loop's next turn
        await asyncio.sleep(0)

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    def _give(self, connection: _Connection) -> None:
        if self._keep_alive and connection.usable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(
                _Connection, self._target.host, self._target.port, ssl=self._tls
            )
        return connection


class _Connection(asyncio.Protocol):
    """One request at a time. The `on_*` methods are httptools' callbacks."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._reusable = True

    @property
    def usable(self) -> bool:
        return (
            self._reusable
            and self._exchange is None
            and self._transport is not None
            and not self._transport.is_closing()
        )

    async def exchange(self, frame: bytes, exchange: Exchange) -> None:
        assert self._transport is not None
        self._exchange = exchange
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(frame)
        await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._exchange is None:
            # bytes that nobody asked for: the stream cannot be trusted any more
            self._reusable = False
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._reusable = False
            self._finish("bad http")

    def connection_lost(self, exc: Exception | None) -> None:
        self._reusable = False
        self._finish("disconnect")

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        self._reusable = self._parser.should_keep_alive()
        self._finish(None)

    def _finish(self, failure: str | None) -> None:
        if self._exchange is not None and self._done is not None and not self._done.done():
            self._exchange.failure = failure
            self._exchange = None
            self._done.set_result(None)

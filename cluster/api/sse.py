"""A server-sent event stream: ends with the client, and speaks up while there is nothing to say.

Watches for the client's disconnect while the producer is waiting, so that a request is given up in any
state. The client's pace is the producer's: nothing is read ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends what `events` yields, then calls `close`, whatever happened.

    `events` must not raise: errors after the stream began are events, too.
    ping_s: silence that is broken by a comment. stall_s: time without reading after which a client is cut.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None], ping_s: float, stall_s: float
    ) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        # a stream's length is not known
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._ping_s = ping_s
        self._stall_s = stall_s
        self._sent_at = 0.0
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = (self._stream(send), left(receive), self._watch(send))
        streaming, *others = [asyncio.ensure_future(part) for part in work]
        try:
            await asyncio.wait((streaming, *others), return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
        finally:
            self._close()
            for task in (streaming, *others):
                task.cancel()
            await asyncio.gather(streaming, *others, return_exceptions=True)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:
            async for data in events:
                await self._send(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        self._sending = True
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending = False

    async def _watch(self, send: Send) -> None:
        """Breaks silence; returns when the client has not read for too long."""
        clock = asyncio.get_running_loop().time
        self._sent_at = clock()
        while True:
            quiet = clock() - self._sent_at
            if self._sending:
                if quiet >= self._stall_s:
                    return
                await asyncio.sleep(self._stall_s - quiet)
            elif quiet >= self._ping_s:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._send(send, PING), self._stall_s)
            else:
                await asyncio.sleep(min(self._ping_s - quiet, self._stall_s))


async def left(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass

"""A server-sent event stream: ends with the client, and speaks up while there is nothing to say.

Watches for the client's disconnect while the producer is waiting, so that a request is given up in any
state. The client's pace is the producer's: nothing is read ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends what `events` yields, then calls `close`, whatever happened.

    `events` must not raise: errors after the stream began are events, too.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        ping_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        # a stream's length is not known
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._ping_s = ping_s
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(self._stream(send)), asyncio.ensure_future(left(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            self._close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        clock = asyncio.get_running_loop().time
        self._sent_at = clock()
        pinging = asyncio.create_task(self._ping(send))
        try:
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    self._sent_at = clock()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            pinging.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + self._ping_s - clock()))
            if clock() - self._sent_at >= self._ping_s:
                self._sent_at = clock()
                await send({"type": "http.response.body", "body": PING, "more_body": True})


async def left(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass

"""An event stream at the level of ASGI: the client's pace, its silence, and its leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from decodefleet.cluster.api.sse import PING, EventStream


class Client:
    """The other side of an ASGI response."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.put_nowait(message)

    async def body(self) -> bytes:
        message = await self.sent.get()
        assert message["type"] == "http.response.body"
        body: bytes = message["body"]
        return body

    async def call(self, stream: EventStream) -> None:
        await stream({"type": "http"}, self.receive, self.send)


class Producer:
    """Yields what it is given; knows how often it was closed."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.closed = 0
        self.ended = False

    def close(self) -> None:
        self.closed += 1

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            while (item := await self.items.get()) is not None:
                yield item
        finally:
            self.ended = True


def stream_of(producer: Producer, ping_s: float = 60, stall_s: float = 60) -> EventStream:
    return EventStream(producer.events(), producer.close, ping_s, stall_s)


async def test_events_are_sent_as_they_come_and_the_end_is_sent() -> None:
    client, producer = Client(), Producer()
    serving = asyncio.create_task(client.call(stream_of(producer)))
    start = await client.sent.get()
    headers = dict(start["headers"])
    assert start["status"] == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    producer.items.put_nowait(b"one")
    assert await client.body() == b"one"
    producer.items.put_nowait(None)
    assert await client.sent.get() == {"type": "http.response.body", "body": b"", "more_body": False}
    await serving
    assert producer.closed == 1


async def test_silence_is_broken_by_pings() -> None:
    client, producer = Client(), Producer()
    serving = asyncio.create_task(client.call(stream_of(producer, ping_s=0.01)))
    await client.sent.get()
    assert [await client.body() for _ in range(2)] == [PING, PING]
    producer.items.put_nowait(None)
    await serving
    while not client.sent.empty():
        assert client.sent.get_nowait()["body"] in (PING, b"")


async def test_leaving_closes_the_producer_while_it_waits() -> None:
    client, producer = Client(), Producer()
    serving = asyncio.create_task(client.call(stream_of(producer)))
    await client.sent.get()
    client.left.set()
    await serving
    assert producer.closed == 1
    assert producer.ended


async def test_leaving_closes_the_producer_while_the_client_does_not_read() -> None:
    client, producer = Client(), Producer()
    serving = asyncio.create_task(client.call(stream_of(producer)))
    await client.sent.get()
    client.reads.clear()
    for _ in range(3):
        producer.items.put_nowait(b"never read")
    await asyncio.sleep(0.01)
    # nothing is read ahead of the client
    assert producer.items.qsize() == 2
    client.left.set()
    await serving
    assert (producer.closed, producer.ended) == (1, True)


async def test_a_cancelled_call_closes_the_producer() -> None:
    client, producer = Client(), Producer()
    serving = asyncio.create_task(client.call(stream_of(producer)))
    await client.sent.get()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert (producer.closed, producer.ended) == (1, True)


@pytest.mark.parametrize("talking", [True, False], ids=["with events", "in silence"])
async def test_a_client_that_does_not_read_is_cut(talking: bool) -> None:
    client, producer = Client(), Producer()
    stream = stream_of(producer, ping_s=60 if talking else 0.01, stall_s=0.05)
    serving = asyncio.create_task(client.call(stream))
    await client.sent.get()
    client.reads.clear()
    if talking:
        producer.items.put_nowait(b"never read")
    await serving
    assert (producer.closed, producer.ended) == (1, True)


async def test_a_client_that_reads_late_but_in_time_is_kept() -> None:
    client, producer = Client(), Producer()
    serving = asyncio.create_task(client.call(stream_of(producer, ping_s=0.01, stall_s=30)))
    await client.sent.get()
    client.reads.clear()
    producer.items.put_nowait(b"late")
    await asyncio.sleep(0.05)
    client.reads.set()
    while await client.body() != b"late":
        pass
    producer.items.put_nowait(None)
    await serving

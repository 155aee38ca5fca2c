"""A small OpenAI-compatible server that speaks real HTTP over a socket, and misbehaves on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class Manners:
    """How the server answers.

    statuses: of the first requests, before it answers 200. cut_after: closes the connection after this many
    events. shred: sends one byte per chunk. tokens_per_chunk: several tokens travel in one event.
    """

    usage: bool = True
    cached_tokens: int = 0
    statuses: list[int] = field(default_factory=list)
    cut_after: int | None = None
    keep_alive: bool = True
    drop_idle: bool = False
    shred: bool = False
    newline: str = "\n"
    tokens_per_chunk: int = 1
    stream_error: bool = False
    silent: bool = False
    token_delay_s: float = 0.0


@dataclass
class Server:
    """What was asked of it so far."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    in_flight: int = 0
    most_in_flight: int = 0


Serving = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serving() -> Serving:
    @asynccontextmanager
    async def start(**manners: Any) -> AsyncIterator[Server]:
        server = Server("")
        behaviour = Manners(**manners)
        open_connections: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(_connection(server, behaviour, reader, writer))
            open_connections.add(task)
            task.add_done_callback(open_connections.discard)

        listener = await asyncio.start_server(accept, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield server
        finally:
            listener.close()
            for task in open_connections:
                task.cancel()
            await asyncio.gather(*open_connections, return_exceptions=True)
            await listener.wait_closed()

    return start


async def _connection(
    server: Server, manners: Manners, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    server.connections += 1
    try:
        while await _exchange(server, manners, reader, writer):
            pass
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _exchange(
    server: Server, manners: Manners, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """Answers one request; true when the connection stays open."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    start, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    keep = manners.keep_alive and headers.get("connection") != "close"
    if start.startswith("GET /v1/models"):
        _plain(writer, 200, {"data": [{"id": "tiny"}]})
        return keep
    server.bodies.append(json.loads(body))
    server.headers.append(headers)
    status = manners.statuses.pop(0) if manners.statuses else 200
    if status != 200:
        _plain(writer, status, {"error": {"message": f"no: {status}"}})
        return keep
    server.in_flight += 1
    server.most_in_flight = max(server.most_in_flight, server.in_flight)
    complete = await _stream(manners, server.bodies[-1], writer, keep)
    server.in_flight -= 1
    return keep and complete and not manners.drop_idle


def _plain(writer: asyncio.StreamWriter, status: int, document: Any) -> None:
    body = json.dumps(document).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


async def _stream(manners: Manners, body: dict[str, Any], writer: asyncio.StreamWriter, keep: bool) -> bool:
    connection = "keep-alive" if keep else "close"
    head = f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: {connection}\r\n\r\n"
    writer.write(head.encode() + b"6\r\n: ping\r\n4\r\n\r\n\r\n\r\n")
    for index, event in enumerate(_events(manners, body)):
        if index == manners.cut_after:
            return False
        if manners.token_delay_s:
            await asyncio.sleep(manners.token_delay_s)
        data = f"data: {event}{manners.newline * 2}".encode()
        for part in [data[i : i + 1] for i in range(len(data))] if manners.shred else [data]:
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


def _events(manners: Manners, body: dict[str, Any]) -> list[str]:
    left = 0 if manners.silent else body["max_tokens"]
    chat = "messages" in body
    events = [_event(chat, "", role=True)] if chat else []
    while left > 0:
        count = min(manners.tokens_per_chunk, left)
        left -= count
        events.append(_event(chat, "ab " * count))
    events.append(_event(chat, "", finish="length"))
    if manners.stream_error:
        events.append(json.dumps({"error": {"message": "worker lost"}}))
    if manners.usage and body.get("stream_options", {}).get("include_usage"):
        prompt = body.get("prompt") or body["messages"][0]["content"]
        count = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        usage = {
            "prompt_tokens": count,
            "completion_tokens": 0 if manners.silent else body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": manners.cached_tokens},
        }
        events.append(json.dumps({"choices": [], "usage": usage}))
    return [*events, "[DONE]"]


def _event(chat: bool, text: str, *, role: bool = False, finish: str | None = None) -> str:
    if not chat:
        return json.dumps({"choices": [{"text": text, "finish_reason": finish}], "usage": None})
    delta = {"role": "assistant", "content": ""} if role else {"content": text}
    return json.dumps({"choices": [{"delta": {} if finish else delta, "finish_reason": finish}]})

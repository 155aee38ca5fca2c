"""Sends requests: as many at once as asked (closed loop), or each at its time (open loop).

The next request's body is built while its time or a free slot is waited for, so that building it delays
nothing and counts for nothing. Knows HTTP and workloads; responses are kept as they came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from .http import Exchange, HttpClient
from .prompts import PromptMaker
from .workload import Request

Api = Literal["completions", "chat"]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Dialect:
    """How a request is put to a server. `extra` is merged into each body, and wins."""

    model: str
    make_prompt: PromptMaker
    api: Api = "completions"
    ignore_eos: bool = True
    include_usage: bool = True
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.api == "chat" else "/v1/completions"

    def body(self, request: Request) -> bytes:
        prompt = self.make_prompt(request)
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_len,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        return _encode({**body, **self.extra})


@dataclass(frozen=True)
class Run:
    """What a run gave. late: per request of an open loop, how many seconds after its time it was sent."""

    exchanges: list[Exchange]
    duration_s: float
    client_cpu_s: float
    late: list[float]
    peak_in_flight: int


class Sender:
    """Sends bodies and counts what is in flight. `on_done` is called after each response."""

    def __init__(self, client: HttpClient, dialect: Dialect, on_done: Callable[[Exchange], None]) -> None:
        self._client = client
        self._dialect = dialect
        self._on_done = on_done
        self._in_flight = 0
        self.peak = 0

    def body(self, request: Request) -> bytes:
        return self._dialect.body(request)

    async def send(self, body: bytes) -> Exchange:
        self._in_flight += 1
        self.peak = max(self.peak, self._in_flight)
        exchange = await self._client.request("POST", self._dialect.path, body)
        self._in_flight -= 1
        self._on_done(exchange)
        return exchange


async def closed_loop(sender: Sender, requests: Sequence[Request], concurrency: int) -> Run:
    """`concurrency` clients, each of which sends its next request when its last is answered."""
    exchanges: list[Exchange] = []
    waiting = iter(requests)

    async def one_client() -> None:
        for request in waiting:
            exchanges.append(await sender.send(sender.body(request)))

    clock = _Clock()
    await asyncio.gather(*(one_client() for _ in range(min(concurrency, len(requests)))))
    return clock.stop(exchanges, [], sender.peak)


async def open_loop(sender: Sender, requests: Sequence[Request]) -> Run:
    """Each request at its own time, however many are still unanswered."""
    late: list[float] = []
    clock = _Clock()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in requests:
            body = sender.body(request)
            due = clock.started + (request.at or 0.0)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            late.append(time.perf_counter() - due)
            tasks.append(group.create_task(sender.send(body)))
    return clock.stop([task.result() for task in tasks], late, sender.peak)


class _Clock:
    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._cpu = time.process_time()

    def stop(self, exchanges: list[Exchange], late: list[float], peak: int) -> Run:
        return Run(exchanges, time.perf_counter() - self.started, time.process_time() - self._cpu, late, peak)

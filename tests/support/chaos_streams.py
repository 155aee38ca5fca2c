"""Seeded requests, and a raw client that keeps every byte with its time.

Nothing between us and the socket retries, buffers or repairs: what is compared is what a client was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from raw_http import post

WORDS = "river engine orchard letter bridge clock lantern harbour meadow copper violin canyon"
# some streams begin after the harm was done
SPREAD_S = 1.6
READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Request:
    """One stream to ask for; `starts_s` after the others' common start."""

    number: int
    body: dict[str, Any]
    starts_s: float


@dataclass(frozen=True)
class Length:
    """How many tokens answers have: enough that streams are in the middle when something dies."""

    shortest: int
    longest: int


@dataclass
class Choice:
    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: list[tuple[str, float]] = field(default_factory=list)


@dataclass
class Answer:
    """What must be equal in a disturbed and an undisturbed run."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass
class Transcript:
    """All that came over one connection, with times."""

    request: Request
    began: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None

    @property
    def raw(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def silence_after(self, moment: float) -> float:
        """The longest pause that ended after `moment`; 0 for one that had ended, or is not streamed."""
        if not self.request.body["stream"]:
            return 0.0
        times = [self.began, *(at for at, _ in self.pieces)]
        return max((b - a for a, b in itertools.pairwise(times) if b > moment), default=0.0)

    def answer(self) -> Answer:
        """Raises ValueError, saying what is wrong with it, unless it is whole."""
        if self.failure is not None:
            raise ValueError(f"{self.failure} after {len(self.raw)} bytes")
        if not self.pieces:
            raise ValueError("the connection ended before anything came")
        head, _, body = self.raw.partition(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise ValueError(f"{head.splitlines()[0].decode()}: {body[:300].decode(errors='replace')}")
        if b"transfer-encoding: chunked" in head.lower():
            body = unchunk(body)
        text = body.decode()
        return parse_events(text) if self.request.body["stream"] else parse_answer(json.loads(text))


def make_requests(
    seed: int, count: int, model: str, length: Length, *, spread_s: float = SPREAD_S
) -> list[Request]:
    """Half of them sampled; some with n = 2, logprobs, stop strings, penalties, or unstreamed."""
    rng = random.Random(seed)
    return [
        Request(number, _body(rng, number, model, length), rng.uniform(0.0, spread_s))
        for number in range(count)
    ]


async def run_streams(url: str, requests: Sequence[Request]) -> list[Transcript]:
    """All of them at once, each to its end."""
    began = time.monotonic()
    return await asyncio.gather(*(_stream(url, request, began) for request in requests))


def unchunk(body: bytes) -> bytes:
    """Raises ValueError where the last chunk is missing."""
    parts: list[bytes] = []
    while True:
        size, found, rest = body.partition(b"\r\n")
        if not found:
            raise ValueError(f"the connection ended after {len(parts)} pieces")
        length = int(size, 16)
        if length == 0:
            return b"".join(parts)
        parts.append(rest[:length])
        body = rest[length + 2 :]


def parse_events(text: str) -> Answer:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise ValueError(f"the stream has no end: {events[-1:]}")
    answer = Answer()
    for event in events[:-1]:
        _take(answer, json.loads(event))
    return _whole(answer)


def parse_answer(body: dict[str, Any]) -> Answer:
    answer = Answer()
    _take(answer, body)
    return _whole(answer)


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise ValueError(f"an error in the stream: {event['error']}")
    if event.get("usage"):
        answer.prompt_tokens = event["usage"]["prompt_tokens"]
        answer.completion_tokens = event["usage"]["completion_tokens"]
    for news in event["choices"]:
        choice = answer.choices.setdefault(news["index"], Choice())
        if choice.finish_reason is not None:
            raise ValueError(f"choice {news['index']} goes on after its end")
        choice.text += news["text"]
        choice.finish_reason, choice.stop_reason = news["finish_reason"], news.get("stop_reason")
        scored = news.get("logprobs")
        if scored is not None:
            choice.logprobs += zip(scored["tokens"], scored["token_logprobs"], strict=True)


def _whole(answer: Answer) -> Answer:
    endless = [index for index, choice in answer.choices.items() if choice.finish_reason is None]
    if endless or not answer.choices:
        raise ValueError(f"choices without an end: {endless}")
    return answer


def _body(rng: random.Random, number: int, model: str, length: Length) -> dict[str, Any]:
    words = [rng.choice(WORDS.split()) for _ in range(rng.randrange(8, 60))]
    body: dict[str, Any] = {
        "model": model,
        "prompt": f"Story {number}: " + " ".join(words),
        "max_tokens": rng.randrange(length.shortest, length.longest),
        "ignore_eos": True,
        "stream": number % 10 != 9,
        "temperature": 0,
    }
    if number % 2:
        body |= {"temperature": 1.0, "seed": rng.randrange(1 << 31), "top_p": 0.95}
    if number % 5 == 1:
        body["n"] = 2
    if number % 5 == 2:
        body["logprobs"] = 2
    if number % 5 == 3:
        # of the real model, which does not echo, a few letters come sooner or later
        body["stop"] = [" ".join(words[-2:]), "zq"]
    if number % 5 == 4:
        body |= {"frequency_penalty": 0.2, "presence_penalty": 0.1}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return body


async def _stream(url: str, request: Request, began: float) -> Transcript:
    await asyncio.sleep(max(0.0, began + request.starts_s - time.monotonic()))
    transcript = Transcript(request, time.monotonic())
    parts = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        async with closing(writer):
            writer.write(post("/v1/completions", request.body, connection="close"))
            while data := await reader.read(READ_BYTES):
                transcript.pieces.append((time.monotonic(), data))
    except OSError as error:
        transcript.failure = repr(error)
    return transcript


@contextlib.asynccontextmanager
async def closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """Closes the connection, and waits until it is closed."""
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

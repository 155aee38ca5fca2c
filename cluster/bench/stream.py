"""What one response says: arrival of tokens, counts, and how it failed. Pure; reads what `http.py` collected.

An event arrives when the piece with its last byte does. Tokens are counted from `usage`; a server that sends
none is counted by its chunks, and the outcome says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import msgspec

from .http import Exchange

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it; durations in seconds.

    started: when it was sent, by `time.perf_counter()`.
    ttft: until the first piece of generated text; None when there was none.
    gaps: between consecutive pieces of generated text.
    error: kind of failure, None for success.
    """

    started: float
    latency: float
    ttft: float | None = None
    gaps: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    counted_from: Literal["usage", "chunks"] = "usage"
    finish_reason: str | None = None
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first."""
        return sum(self.gaps) / (self.output_tokens - 1) if self.output_tokens > 1 and self.gaps else None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_token(self) -> bool:
        if self.delta is not None:
            return bool(self.delta.content or self.delta.reasoning_content)
        # half a character may yield an empty text, yet it is a token; the closing event is not
        return bool(self.text) or (self.text is not None and self.finish_reason is None)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


def read(exchange: Exchange) -> Outcome:
    """The outcome of a streamed completion or chat completion."""
    latency = exchange.ended - exchange.started
    if exchange.failure is not None:
        return Outcome(exchange.started, latency, error=exchange.failure)
    if exchange.status != 200:
        return Outcome(exchange.started, latency, error=f"HTTP {exchange.status}")
    try:
        return _outcome(exchange, latency)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Outcome(exchange.started, latency, error="malformed event")


def _outcome(exchange: Exchange, latency: float) -> Outcome:
    arrivals: list[float] = []
    usage: _Usage | None = None
    finish_reason = error = None
    for arrival, data in events(exchange.pieces):
        if data == DONE:
            continue
        event = _decoder.decode(data)
        usage = event.usage or usage
        if event.error is not None:
            error = "error in stream"
        for choice in event.choices:
            finish_reason = choice.finish_reason or finish_reason
            if choice.has_token():
                arrivals.append(arrival)
    counted = usage is not None and usage.completion_tokens is not None
    details = usage.prompt_tokens_details if usage else None
    return Outcome(
        exchange.started,
        latency,
        ttft=arrivals[0] - exchange.started if arrivals else None,
        gaps=tuple(later - earlier for earlier, later in pairwise(arrivals)),
        prompt_tokens=usage.prompt_tokens if usage else None,
        output_tokens=(usage.completion_tokens or 0) if usage and counted else len(arrivals),
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        counted_from="usage" if counted else "chunks",
        finish_reason=finish_reason,
        error=error or (None if arrivals else "no tokens"),
    )


def events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(arrival, data) of each server-sent event; comments and other fields are skipped."""
    rest = b""
    for arrival, piece in pieces:
        *blocks, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield arrival, b"\n".join(lines)

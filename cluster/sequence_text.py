"""One of a request's sequences as its client sees it: tokens received, text given out, how it ended.

It outlives attempts and workers: what was emitted is the truth from which another worker goes on, and a stop
string that is half matched when a worker dies is matched across the two. Knows neither workers nor HTTP.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from decodefleet.worker.protocol import TokenDelta, TokenLogprobs
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.text.stream import TextStream
from decodefleet.worker.text.tokenizer import Tokenizer

Finish = Literal["stop", "length"]


@dataclass(slots=True)
class Piece:
    """News of one sequence for the client.

    tokens: ids received, the end token included. logprobs and offsets: one per token whose text is out by
    now, where logprobs were asked for. stop_reason: the stop string or stop token that ended it.
    """

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None


class SequenceText:
    """emitted: every token taken so far. done: nothing more is taken."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        prompt: list[int],
        eos_token_ids: tuple[int, ...],
        skip_special_tokens: bool,
    ) -> None:
        self.index = index
        self.emitted: list[int] = []
        self.done = False
        self._eos = eos_token_ids
        self._text = TextStream(
            tokenizer,
            params,
            prompt=prompt,
            skip_special_tokens=skip_special_tokens,
            account=params.logprobs is not None,
        )
        self._unaccounted: deque[TokenLogprobs] = deque()

    def push(self, delta: TokenDelta) -> Piece:
        """Take what a worker sent; errors and aborts never come here."""
        self.emitted += delta.tokens
        self._unaccounted += delta.logprobs or ()
        reason: Finish | None = "stop" if delta.finish_reason == "stop" else None
        if delta.finish_reason == "length":
            reason = "length"
        finished = delta.finish_reason is not None
        news = self._text.push(delta.tokens, finished=finished, stop_token=delta.stop_token)
        ready = min(len(news.offsets), len(self._unaccounted))
        piece = Piece(
            index=self.index,
            text=news.text,
            tokens=delta.tokens,
            logprobs=tuple(self._unaccounted.popleft() for _ in range(ready)),
            offsets=news.offsets,
            finish_reason=reason,
        )
        if news.stop_match is not None:
            piece.finish_reason, piece.stop_reason = "stop", news.stop_match
        elif delta.stop_token is not None and delta.stop_token not in self._eos:
            piece.stop_reason = delta.stop_token
        self.done = piece.finish_reason is not None
        return piece

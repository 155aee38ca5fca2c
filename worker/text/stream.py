"""One sequence's tokens to the text its client sees: detokenization, stop strings, and which tokens that
text accounts for. Knows neither HTTP nor workers; the router owns one per sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..sampling_params import SamplingParams
from .detokenizer import IncrementalDetokenizer
from .stop import StopStrings
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """News for the client.

    text: final; follows what was given out before.
    offsets: one per token that is wholly accounted for by now and was not before: where in the sequence's
        text, in characters, it begins. Tokens are accounted for in order, so that a caller who keeps their
        logprobs in a queue takes `len(offsets)` from its front. Tokens cut off by a stop never are.
    stop_match: the stop string that ended the text; nothing follows.
    """

    text: str = ""
    offsets: tuple[int, ...] = ()
    stop_match: str | None = None


class TextStream:
    """Stateful; push deltas in order."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        account: bool = True,
    ) -> None:
        """account: False where nobody asks for offsets, which may then be missing."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, after=prompt)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        # each token is looked at by itself only where its place in the text matters
        self._whole = not (account or params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._unchecked = params.min_tokens
        self._decoded = 0
        self._emitted = 0
        self._ended = False
        # tokens not accounted for, as (start, end) in the decoded text; those that end inside a character
        # have no end yet
        self._open: deque[tuple[int, int]] = deque()
        self._unfinished: list[int] = []

    def push(
        self, token_ids: Sequence[int], *, finished: bool = False, stop_token: int | None = None
    ) -> TextDelta:
        """Take the next tokens.

        finished: no more tokens come. stop_token: the last id ended the sequence, and is not part of the
        text unless stop strings are to be included. Stop strings are not looked for in the text of the
        first `min_tokens` tokens. After a match all pushes are empty.
        """
        if self._ended:
            return TextDelta()
        if stop_token is not None and not self._include_stop:
            token_ids = token_ids[:-1]
        if self._whole:
            self._ended = finished
            text = self._detokenizer.push(token_ids)
            return TextDelta(text + self._detokenizer.finish() if finished else text)
        parts: list[str] = []
        match: str | None = None
        for token in token_ids:
            match = self._take(token, parts)
            if match is not None:
                break
        if finished and match is None:
            match = self._finish(parts)
        if match is not None:
            self._close()
        self._ended = finished or match is not None
        text = "".join(parts)
        self._emitted += len(text)
        return TextDelta(text, self._account(), match)

    def _take(self, token: int, parts: list[str]) -> str | None:
        start = self._decoded
        text = self._detokenizer.push((token,))
        self._decoded += len(text)
        if text:
            self._close()
        self._unfinished.append(start)
        if not self._detokenizer.incomplete:
            self._close()
        if self._unchecked:
            self._unchecked -= 1
            parts.append(text)
            return None
        return self._search(text, parts)

    def _finish(self, parts: list[str]) -> str | None:
        rest = self._detokenizer.finish()
        self._decoded += len(rest)
        self._close()
        match = self._search(rest, parts)
        parts.append(self._stops.flush())
        return match

    def _search(self, text: str, parts: list[str]) -> str | None:
        given, match = self._stops.push(text)
        parts.append(given)
        return match

    def _close(self) -> None:
        """The character that was incomplete is complete now: its tokens end here."""
        self._open.extend((start, self._decoded) for start in self._unfinished)
        self._unfinished.clear()

    def _account(self) -> tuple[int, ...]:
        """Take the tokens off the queue whose text has been given out, wholly or up to where it ended."""
        offsets = []
        while self._open:
            start, end = self._open[0]
            cut_short = self._ended and start < self._emitted
            if end > self._emitted and not cut_short:
                break
            offsets.append(start)
            self._open.popleft()
        return tuple(offsets)

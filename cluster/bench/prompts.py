"""Segments made into prompts: token ids, or text of exactly as many tokens. Torch-free.

Ids are drawn from the middle of the vocabulary, clear of special tokens. Text is built from words that
are one token each, so that its length is exact for the tokenizer it was built with.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from .workload import Request, Segment

if TYPE_CHECKING:
    from decodefleet.worker.text.tokenizer import Tokenizer

FIRST_TOKEN = 1000
DEFAULT_VOCABULARY = 20_000
CACHED_SEGMENTS = 4096


class PromptMaker(Protocol):
    def __call__(self, request: Request) -> list[int] | str: ...


class TokenIds:
    """Prompts of token ids below `vocabulary`; the default is inside that of nearly every model."""

    def __init__(self, seed: str, vocabulary: int = DEFAULT_VOCABULARY) -> None:
        self._seed = seed
        self._range = range(min(FIRST_TOKEN, vocabulary // 2), vocabulary)
        self._segment = lru_cache(CACHED_SEGMENTS)(self._draw)

    def __call__(self, request: Request) -> list[int]:
        return [token for segment in request.segments for token in self._segment(segment)]

    def _draw(self, segment: Segment) -> tuple[int, ...]:
        generator = random.Random(f"{self._seed}/{segment.key}")
        return tuple(generator.choices(self._range, k=segment.length))


class Words:
    """Prompts of text. Raises ValueError when no exact lengths can be had with this tokenizer."""

    def __init__(self, seed: str, tokenizer: Tokenizer) -> None:
        self._seed = seed
        self._words = _single_token_words(tokenizer)
        sample = "".join(self._words[:64])
        self._added = len(tokenizer.encode(sample)) - len(self._words[:64])
        if not self._words or not 0 <= self._added <= 2:
            raise ValueError("this tokenizer has no words of one token each: use prompts of token ids")
        self._segment = lru_cache(CACHED_SEGMENTS)(self._draw)

    def __call__(self, request: Request) -> str:
        *shared, last = request.segments
        own = Segment(last.key, max(1, last.length - self._added))
        return "".join(self._segment(segment) for segment in (*shared, own))

    def _draw(self, segment: Segment) -> str:
        generator = random.Random(f"{self._seed}/{segment.key}")
        return "".join(generator.choices(self._words, k=segment.length))


def _single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Words with their leading space that stay one token each whatever words stand beside them."""
    candidates = []
    for token in range(min(tokenizer.vocab_size, DEFAULT_VOCABULARY)):
        text = tokenizer.decode([token])
        if text[:1] == " " and text[1:].isascii() and text[1:].isalpha() and text[1:].islower():
            candidates.append((token, text))
    return [text for token, text in candidates if tokenizer.encode(text * 2, False) == [token, token]]

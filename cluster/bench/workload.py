"""What is asked of the server, and when. Pure and reproducible: everything follows from the seed.

A prompt is a row of segments; equal keys mean equal tokens, which is all that sharing a prefix is. How
segments become token ids or text is `prompts.py`'s business.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` tokens that are the same wherever the key is the same."""

    key: str
    length: int


@dataclass(frozen=True, slots=True)
class Request:
    """at: seconds after the start of the run; None sends it when a slot is free."""

    segments: tuple[Segment, ...]
    output_len: int
    at: float | None = None

    @property
    def input_len(self) -> int:
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True)
class Synthetic:
    """Requests of one size.

    input_len, output_len: tokens in and out, exactly.
    prefix_len: tokens at the front of each prompt that it shares with its group.
    prefix_groups: number of different prefixes, each for as many requests, in an order that follows from the
        run; in turn, eight groups would meet the eight workers of a round robin at one each.
    """

    input_len: int
    output_len: int
    prefix_len: int = 0
    prefix_groups: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.prefix_len <= self.input_len:
            raise ValueError(f"prefix-len {self.prefix_len} does not fit input-len {self.input_len}")

    def requests(self, run: str, count: int, arrivals: Iterator[float] | None = None) -> list[Request]:
        """`run` keeps the prompts of two runs apart, so that one does not warm the cache of the next."""
        groups = [index % self.prefix_groups for index in range(count)]
        random.Random(f"{run}/groups").shuffle(groups)
        return [
            Request(self._segments(run, index, group), self.output_len, next(arrivals) if arrivals else None)
            for index, group in enumerate(groups)
        ]

    def _segments(self, run: str, index: int, group: int) -> tuple[Segment, ...]:
        shared = Segment(f"prefix/{run}/{group}", self.prefix_len)
        own = Segment(f"own/{run}/{index}", self.input_len - self.prefix_len)
        return tuple(segment for segment in (shared, own) if segment.length)


def poisson(rate: float, seed: str) -> Iterator[float]:
    """Arrival times in seconds of a Poisson process of `rate` per second; the first is at 0."""
    draw = random.Random(f"{seed}/arrivals")
    at = 0.0
    while True:
        yield at
        at += draw.expovariate(rate)

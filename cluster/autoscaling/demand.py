"""What was asked of the fleet lately: the requests of the last minutes, and how their number grows. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import sqrt
from typing import NamedTuple

# kept at most; at a higher rate they tell enough in less time
MOST = 3000


class Asked(NamedTuple):
    """One request. prefill_tokens: of the prompt, what no cache supplied. context: tokens in the KV cache
    while it decodes. output_tokens: of the answer, as expected."""

    at: float
    prefill_tokens: int
    context: int
    output_tokens: int


class Demand:
    """Requests in order of arrival."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._asked: deque[Asked] = deque(maxlen=MOST)

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def last_at(self) -> float | None:
        return self._asked[-1].at if self._asked else None

    def add(self, asked: Asked) -> None:
        self._asked.append(asked)
        while self._asked[0].at < asked.at - self._keep_s:
            self._asked.popleft()

    def since(self, moment: float) -> list[Asked]:
        first = bisect_left(self._asked, moment, key=lambda asked: asked.at)
        return list(islice(self._asked, first, None))


def growth(asked: Sequence[Asked], now: float, ahead_s: float) -> float:
    """Work per second expected `ahead_s` from now, against that of the time that `asked` covers; 1 or more.

    A straight line through both halves of that time, as far as their difference is more than chance: two
    standard errors of sums of independent requests are taken off.
    """
    span = now - asked[0].at if asked else 0.0
    if span <= 0:
        return 1.0
    middle = now - span / 2
    old = [one.prefill_tokens + one.output_tokens for one in asked if one.at < middle]
    new = [one.prefill_tokens + one.output_tokens for one in asked if one.at >= middle]
    before, after = sum(old), sum(new)
    chance = sqrt(sum(work * work for work in (*old, *new)))
    slope = max(0.0, after - before - 2 * chance) / (span / 2)
    return 1.0 + slope * (span / 2 + ahead_s) / ((before + after) / 2)

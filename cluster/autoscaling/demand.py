"""What was asked of the fleet lately: the requests of the last minutes, and how their work grows. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

# kept at most; at a higher rate they tell enough in less time
MOST = 3000
# work is summed up in slots, of so long a past
SLOT_S, TREND_S = 5.0, 240.0
# slots that are judged as one, so that some seconds of more requests are noise and no news
TOGETHER = 4
# variances of a slope: what a load without one falls by once in twenty times (t² of 10 degrees of freedom,
# which about so many sums leave)
SURE, ENOUGH = 3.3, 11
# of what was asked of late, so much is expected in any case: chance is not more
LEAST = 0.9


class Asked(NamedTuple):
    """One request. prefill_tokens: of the prompt, what no cache supplied. context: tokens in the KV cache
    while it decodes. output_tokens: of the answer, as expected."""

    at: float
    prefill_tokens: int
    context: int
    output_tokens: int


class Demand:
    """Requests as they are placed: those that waited come after others that arrived later."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._asked: deque[Asked] = deque(maxlen=MOST)
        self._slots: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def last_at(self) -> float | None:
        return self._asked[-1].at if self._asked else None

    def add(self, asked: Asked) -> None:
        self._asked.append(asked)
        while self._asked[0].at < asked.at - self._keep_s:
            self._asked.popleft()
        slot = int(asked.at // SLOT_S)
        if slot not in self._slots:
            oldest = slot - TREND_S / SLOT_S
            self._slots = {old: work for old, work in self._slots.items() if old >= oldest} | {slot: 0}
        self._slots[slot] += asked.prefill_tokens + asked.output_tokens

    def since(self, moment: float) -> list[Asked]:
        """In order of arrival."""
        return sorted(asked for asked in self._asked if asked.at >= moment)

    def work(self, start: float, now: float) -> list[int]:
        """Tokens asked for in each whole slot of the last `TREND_S`, none before `start`."""
        first, end = ceil(max(start, now - TREND_S) / SLOT_S), int(now // SLOT_S)
        return [self._slots.get(slot, 0) for slot in range(first, end)]


class Trend(NamedTuple):
    """growth: work per second that is expected when a new worker serves, against that of late; below 1 only
    where that of late was partly chance. falls: how sure it is that work becomes less, 0 to 1."""

    growth: float = 1.0
    falls: float = 0.0


def trend(work: Sequence[int], recent_s: float, ahead_s: float) -> Trend:
    """work: per slot, oldest first, of which the last `recent_s` are what is replayed.

    A straight line by least squares, of whose slope as much is believed as stands out from what the line
    leaves over (James and Stein's shrinkage): noise has no slope, however steep it looks. Of what the last
    `recent_s` have beside the line as much is believed likewise: the rest was chance and does not come again.
    Bounded both ways, for past a cliff the line is far off.
    """
    span_s = SLOT_S * TOGETHER
    work = _summed(work, TOGETHER)
    recent = work[-max(1, round(recent_s / span_s)) :]
    count, level = len(work), sum(recent) / max(1, len(recent))
    if count < max(3, round(recent_s / span_s)) or not level:
        return Trend()
    middle, mean = (count - 1) / 2, sum(work) / count
    spread = count * (count * count - 1) / 12
    slope = sum((slot - middle) * one for slot, one in enumerate(work)) / spread
    left_over = sum((one - mean - slope * (slot - middle)) ** 2 for slot, one in enumerate(work))
    noise = left_over / (count - 2)
    sloped = slope * _believed(slope, noise / spread)
    line = mean + sloped * (middle - (len(recent) - 1) / 2)
    beside = level - line
    now = line + beside * _believed(beside, noise / len(recent))
    now = max(min(now, max(recent)), LEAST * level)
    soon = now + max(0.0, sloped) * (len(recent) / 2 + ahead_s / span_s)
    sure = slope < 0 and count >= ENOUGH
    return Trend(soon / level, _believed(slope, SURE * noise / spread) if sure else 0.0)


def _believed(seen: float, variance: float) -> float:
    """How much of it is more than chance of such a variance makes, 0 to 1."""
    return max(0.0, 1 - variance / seen**2) if seen else 0.0


def _summed(work: Sequence[int], together: int) -> list[int]:
    """Sums of so many slots each, of which the newest is whole."""
    return [sum(work[at : at + together]) for at in range(len(work) % together, len(work), together)]

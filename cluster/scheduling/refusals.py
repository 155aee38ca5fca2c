"""When a request is refused, with which words, and when it is worth trying again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from decodefleet.worker.protocol import ModelCard, RefusalReason

from .fleet import Member
from .view import Demand

_MOST_RETRY_S = 30.0
_GAIN = 1 / 16


class Refused(NamedTuple):
    reason: RefusalReason
    message: str
    retry_after_s: float | None = None


class RetryAdvice:
    """How long a queue of given length takes to move on, from the pace at which requests end."""

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._last: float | None = None

    def released(self, now: float) -> None:
        if self._last is not None:
            gap = now - self._last
            self._interval_s = gap if self._interval_s is None else self._mix(self._interval_s, gap)
        self._last = now

    def after(self, waiting: int) -> float:
        """Seconds, between 1 and 30; 1 while nothing is known."""
        return min(_MOST_RETRY_S, max(1.0, waiting * (self._interval_s or 0.0)))

    @staticmethod
    def _mix(old: float, new: float) -> float:
        return old + (new - old) * _GAIN


def too_long(demand: Demand, card: ModelCard) -> Refused | None:
    """Where the model itself cannot take the prompt and one token more."""
    if demand.prompt_tokens + 1 > card.max_model_len:
        return Refused(
            "too_long",
            f"the prompt has {demand.prompt_tokens} tokens and {demand.model} takes "
            f"{card.max_model_len - 1} at most",
        )
    return None


def too_large(demand: Demand, card: ModelCard, serving: Sequence[Member]) -> Refused | None:
    """Where no worker's pool can ever hold it."""
    blocks = card.blocks_for(demand.prompt_tokens + 1)
    pools = [member.stats.total_blocks for member in serving]
    # a worker that has not said how large its pool is may yet hold it
    if pools and all(0 < pool < blocks for pool in pools):
        return Refused(
            "too_long",
            f"the prompt needs {blocks} KV blocks of {card.block_size} tokens and the largest worker "
            f"has {max(pools)}",
        )
    return None


def queue_full(waiting: int, retry_after_s: float) -> Refused:
    return Refused("queue_full", f"{waiting} requests are waiting already", retry_after_s)


def deadline_passed(waited_s: float) -> Refused:
    return Refused("deadline", f"no worker was free within {waited_s:.1f} s")


def no_worker(model: str, grace_s: float) -> Refused:
    return Refused("no_worker", f"no worker of {model} can take requests now", max(1.0, grace_s / 2))


def unknown_model(model: str) -> Refused:
    return Refused("unknown_model", f"no worker serves a model called {model}")

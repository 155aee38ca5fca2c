"""When a request is refused, with which words, and when it is worth trying again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from decodefleet.worker.protocol import ModelCard, RefusalReason

from .fleet import Member
from .view import Demand

_MOST_RETRY_S = 30.0


class Refused(NamedTuple):
    reason: RefusalReason
    message: str
    retry_after_s: float | None = None


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


def queue_full(waiting: int, wait_s: float) -> Refused:
    return Refused("queue_full", f"{waiting} requests are waiting already", _retry_after(wait_s))


def long_wait(wait_s: float, limit_s: float) -> Refused:
    return Refused(
        "queue_full",
        f"a worker would be free in about {wait_s:.1f} s, which is more than {limit_s:.1f} s",
        _retry_after(wait_s),
    )


def hopeless(predicted_s: float, remaining_s: float) -> Refused:
    return Refused(
        "deadline",
        f"the first token would take {predicted_s:.1f} s at best, and {remaining_s:.1f} s are left",
    )


def deadline_passed(waited_s: float) -> Refused:
    return Refused("deadline", f"no worker was free within {waited_s:.1f} s")


def no_worker(model: str, grace_s: float) -> Refused:
    return Refused("no_worker", f"no worker of {model} can take requests now", max(1.0, grace_s / 2))


def unknown_model(model: str) -> Refused:
    return Refused("unknown_model", f"no worker serves a model called {model}")


def _retry_after(wait_s: float) -> float:
    return min(_MOST_RETRY_S, max(1.0, wait_s))

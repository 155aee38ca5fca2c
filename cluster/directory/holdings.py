"""Who holds how much, as plain data: one form for what Redis says and for what the scheduler believes.

Travels as JSON from `/debug/directory` to `decodefleet directory`; fields are only ever added.
"""

from __future__ import annotations

import msgspec

from decodefleet.worker.protocol import Tier

from .keys import TIERS


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one worker.

    blocks: per tier. prefix: leading blocks of the prompt asked about, down to and including each tier.
    state: as the scheduler sees the worker. redis_bytes, lease_s: of its keys. changed_s: age of its newest
    delta.
    """

    model: str
    worker_id: str
    incarnation: str
    blocks: dict[Tier, int]
    prefix: dict[Tier, int] | None = None
    state: str | None = None
    redis_bytes: int | None = None
    lease_s: float | None = None
    changed_s: float | None = None


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """source: who was asked. up, lag_s, gaps: how the scheduler's copy follows Redis.

    prompt_tokens, prompt_blocks: of the prompt asked about.
    """

    source: str
    holders: list[Holding]
    up: bool = True
    lag_s: float | None = None
    gaps: int | None = None
    prompt_tokens: int | None = None
    prompt_blocks: int | None = None


def leading(masks: list[int]) -> dict[Tier, int]:
    """Leading blocks down to and including each tier. masks: the tiers in which each block is."""
    found: dict[Tier, int] = {}
    for count, tier in enumerate(TIERS, start=1):
        within = (1 << count) - 1
        found[tier] = next((i for i, mask in enumerate(masks) if not mask & within), len(masks))
    return found

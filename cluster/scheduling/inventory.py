"""What the scheduler believes of who holds which blocks, as `/debug/directory` tells it. Changes nothing."""

from __future__ import annotations

from decodefleet.worker.protocol import Tier

from ..directory.holdings import Holding, Holdings
from ..directory.keys import TIERS
from .chain import Chain
from .scheduler import GlobalScheduler
from .view import NO_HIT, Hit


def inventory(core: GlobalScheduler, model: str | None, prompt: bytes | None, now: float) -> Holdings:
    """model: this one only. prompt: joined hashes of the full blocks of a prompt; what was dispatched lately
    counts as held by the GPU.
    """
    held = core.index.counts()
    chain = Chain(prompt or b"")
    hits = core.index.hits(chain)
    return Holdings(
        source="scheduler",
        holders=[
            Holding(
                model=member.card.name,
                worker_id=member.key.worker_id,
                incarnation=member.key.incarnation,
                blocks={tier: held.get(member.key, {}).get(tier, 0) for tier in TIERS},
                prefix=None if prompt is None else _prefix(hits.get(member.key, NO_HIT)),
                state=core.fleet.fence(member, now) or "serving",
            )
            for member in sorted(core.fleet, key=lambda member: member.key)
            if model is None or member.card.name == model
        ],
        up=core.directory_up,
        prompt_blocks=None if prompt is None else chain.length,
    )


def _prefix(hit: Hit) -> dict[Tier, int]:
    return {"gpu": hit.gpu_blocks, "cpu": max(hit.gpu_blocks, hit.memory_blocks), "nvme": hit.blocks}

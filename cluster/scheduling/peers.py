"""Which worker another may fetch a prefix from, and for whom that beats computing it. Pure.

Only memory is fetched from, so what counts is what the lender has in GPU and host memory. A lender may be
busy or draining, but must be heard of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from decodefleet.worker.protocol import Peer

from .cost import cost_of, fetch_s
from .view import NO_HIT, Demand, Hit, Hits, WorkerKey, WorkerView

# a fetch of less is not worth the messages
MIN_BLOCKS = 8


class Lender(NamedTuple):
    """endpoint: where it lends. blocks: leading ones that it has in memory."""

    key: WorkerKey
    endpoint: str
    blocks: int


def best_lender(hits: Hits, endpoint_of: Callable[[WorkerKey], str]) -> Lender | None:
    """Who has most of the prompt in memory; endpoint_of: empty for a worker that cannot lend now."""
    best: Lender | None = None
    for key, hit in hits.items():
        blocks = max(hit.gpu_blocks, hit.memory_blocks)
        if blocks >= (MIN_BLOCKS if best is None else best.blocks + 1) and (endpoint := endpoint_of(key)):
            best = Lender(key, endpoint, blocks)
    return best


def worth_asking(
    chosen: WorkerView, views: Sequence[WorkerView], demand: Demand, hits: Hits, lender: Lender
) -> bool:
    """Whether fetching can change where a request goes, or what it costs there.

    Looked at for one worker, since those of a fleet are alike, and most requests share a prefix.
    """
    other = chosen if chosen.key != lender.key else next((v for v in views if v.key != lender.key), None)
    if other is None or not _worth_fetching(other, hits, lender):
        return False
    moving = fetch_s(other, lender.blocks * other.card.block_size)
    return chosen is other or cost_of(chosen, demand, hits.get(chosen.key, NO_HIT)).total > moving


def with_lender(views: Sequence[WorkerView], hits: Hits, lender: Lender) -> dict[WorkerKey, Hit]:
    """The hits, with what each of the others would fetch from the lender rather than compute."""
    extended: dict[WorkerKey, Hit] = dict(hits)
    for view in views:
        if view.key != lender.key and _worth_fetching(view, hits, lender):
            hit = hits.get(view.key, NO_HIT)
            extended[view.key] = msgspec.structs.replace(hit, peer_blocks=lender.blocks)
    return extended


def peer_of(hit: Hit, lender: Lender | None) -> Peer | None:
    """Whom to tell a worker of that is to serve a request with this hit."""
    if lender is None or hit.peer_blocks <= hit.blocks:
        return None
    return Peer(
        worker_id=lender.key.worker_id,
        incarnation=lender.key.incarnation,
        endpoint=lender.endpoint,
        blocks=lender.blocks,
    )


def _worth_fetching(view: WorkerView, hits: Hits, lender: Lender) -> bool:
    more = lender.blocks - hits.get(view.key, NO_HIT).blocks
    tokens = more * view.card.block_size
    return more >= MIN_BLOCKS and fetch_s(view, tokens) < tokens * view.step_time.prefill_token

"""Which of a model's live workers could take a request now. Pure: (views, demand, hits) -> views."""

from __future__ import annotations

from collections.abc import Sequence

from decodefleet.worker.protocol import ModelCard

from .view import NO_HIT, Demand, Hits, WorkerView


def with_room(views: Sequence[WorkerView], demand: Demand, hits: Hits, ahead_s: float) -> list[WorkerView]:
    """Those where it need not queue for memory, nor behind more than `ahead_s` of prefill.

    None as long as all have that much to do. While some have not, one that has is among them where it holds
    some of the prompt: its cost tells if that is worth the wait.
    """
    found, begins_soon = [], False
    card: ModelCard | None = None
    for view in views:
        if view.card is not card:
            card = view.card
            needed = card.blocks_for(demand.prompt_tokens + demand.expected_tokens * demand.n, demand.n)
            least = card.blocks_for(demand.prompt_tokens + 1)
        seats, blocks, pool, start_s = view.room
        fits = seats >= demand.n and blocks >= needed and pool >= least
        holds = bool(hits) and view.key in hits
        # what it holds takes no new room
        if not fits and holds:
            fits = view.fits(demand, hits.get(view.key, NO_HIT))
        if fits and (start_s <= ahead_s or holds):
            found.append(view)
            begins_soon = begins_soon or start_s <= ahead_s
    return found if begins_soon else []

"""Why requests went where they went: a bounded ring of placements and refusals, for people to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any

import msgspec

from .candidates import Candidates
from .cost import FORMULA, cost_of, mean_running, total_costs, usable
from .policy import Hits
from .queue import Waiter
from .view import NO_HIT, Demand, Hit, WorkerKey, WorkerView

NO_HITS: Hits = MappingProxyType({})


class Decision(msgspec.Struct, frozen=True, gc=False):
    """at: on the scheduler's clock. chosen: None where the request was refused, for the reason given.
    returned: it went to its session's worker, though another cost a little less.

    Costs are not kept: they follow from views, demand and hits, which are.
    """

    request_id: str
    attempt: int
    router_id: str
    model: str
    at: float
    waited_s: float
    policy: str
    demand: Demand
    chosen: WorkerKey | None = None
    considered: Sequence[WorkerView] = ()
    hits: Hits = NO_HITS
    refused: str | None = None
    tenant: str = ""
    priority: int = 0
    returned: bool = False

    @classmethod
    def on(
        cls,
        waiter: Waiter,
        now: float,
        policy: str,
        *,
        chosen: WorkerKey | None = None,
        considered: Sequence[WorkerView] = (),
        hits: Hits = NO_HITS,
        refused: str | None = None,
        returned: bool = False,
    ) -> Decision:
        return cls(
            request_id=waiter.key.request_id,
            attempt=waiter.place.attempt,
            router_id=waiter.key.router_id,
            model=waiter.place.model,
            at=now,
            waited_s=now - waiter.arrived,
            policy=policy,
            demand=waiter.demand,
            chosen=chosen,
            considered=considered,
            hits=hits,
            refused=refused,
            tenant=waiter.place.tenant,
            priority=waiter.place.priority,
            returned=returned,
        )

    def hit(self, view: WorkerView) -> Hit:
        return self.hits.get(view.key, NO_HIT)


class DecisionLog:
    def __init__(self, capacity: int) -> None:
        self._ring: deque[Decision] = deque(maxlen=capacity)
        self._by_request: dict[str, list[Decision]] = {}
        self.added = 0

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, decision: Decision) -> None:
        if len(self._ring) == self._ring.maxlen:
            self._forget(self._ring[0])
        self._ring.append(decision)
        self.added += 1
        self._by_request.setdefault(decision.request_id, []).append(decision)

    def since(self, added: int) -> list[Decision]:
        """Those that came after `added` had been added, as far as they are kept; oldest first."""
        new = min(self.added - added, len(self._ring))
        return list(islice(reversed(self._ring), new))[::-1]

    def explain(self, request_id: str) -> list[dict[str, Any]]:
        """All decisions on one request, oldest first; empty when it is unknown or too old."""
        return [_plain(decision) for decision in self._by_request.get(request_id, ())]

    def recent(
        self, count: int, *, since: float = float("-inf"), candidates: int | None = None
    ) -> list[dict[str, Any]]:
        """The latest decisions, newest first. since: on the scheduler's clock; what came before is left out.
        candidates: of each, so many of those considered are told, the chosen one and the cheapest.
        """
        newest = takewhile(lambda decision: decision.at > since, islice(reversed(self._ring), count))
        return [_plain(decision, candidates) for decision in newest]

    def _forget(self, decision: Decision) -> None:
        # decisions leave in the order in which they came, so it is the first of its request
        kept = self._by_request[decision.request_id]
        kept.pop(0)
        if not kept:
            del self._by_request[decision.request_id]


def _cheapest(decision: Decision, count: int) -> Sequence[WorkerView]:
    """The chosen one, then the cheapest."""
    views = decision.considered
    if not views:
        return ()
    costs = total_costs(Candidates.of(views), decision.demand, decision.hits)
    order = sorted(range(len(views)), key=lambda row: (views[row].key != decision.chosen, costs[row]))
    return [views[row] for row in order[:count]]


def _plain(decision: Decision, candidates: int | None = None) -> dict[str, Any]:
    chosen, demand = decision.chosen, decision.demand
    told = decision.considered if candidates is None else _cheapest(decision, candidates)
    mean = mean_running(decision.considered) if decision.considered else 0.0
    cached = [
        view.cached_tokens(demand, usable(view, decision.hit(view)))
        for view in decision.considered
        if view.key == chosen
    ]
    return {
        "request_id": decision.request_id,
        "attempt": decision.attempt,
        "router_id": decision.router_id,
        "model": decision.model,
        "at": decision.at,
        "waited_s": decision.waited_s,
        "policy": decision.policy,
        "formula": FORMULA,
        "tenant": decision.tenant,
        "priority": decision.priority,
        "returned_to_session": decision.returned,
        "prompt_tokens": demand.prompt_tokens,
        "expected_tokens": demand.expected_tokens,
        "n": demand.n,
        "worker_id": chosen.worker_id if chosen else None,
        "incarnation": chosen.incarnation if chosen else None,
        "hit_tokens": cached[0] if cached else 0,
        "refused": decision.refused,
        "candidates": len(decision.considered),
        "considered": [_candidate(view, decision, mean) for view in told],
    }


def _candidate(view: WorkerView, decision: Decision, mean: float) -> dict[str, Any]:
    hit = decision.hit(view)
    cost = cost_of(view, decision.demand, hit, mean)
    return {
        "worker_id": view.key.worker_id,
        "incarnation": view.key.incarnation,
        "hit_tokens": view.cached_tokens(decision.demand, usable(view, hit)),
        "hit_blocks": {"gpu": hit.gpu_blocks, "memory": hit.memory_blocks, "anywhere": hit.blocks},
        "step_time": msgspec.structs.asdict(view.step_time),
        "queued_prefill_tokens": view.load.prefill_tokens,
        "sequences": view.load.sequences,
        "headroom_blocks": view.headroom_blocks,
        "cost_s": {**cost._asdict(), "total": cost.total},
    }

"""Why requests went where they went: a bounded ring of placements and refusals, for people to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from .policy import Considered
from .view import Demand, WorkerKey


class Decision(msgspec.Struct, frozen=True, gc=False):
    """at: on the scheduler's clock. chosen: None where the request was refused, for the reason given."""

    request_id: str
    attempt: int
    router_id: str
    model: str
    at: float
    waited_s: float
    policy: str
    demand: Demand | None = None
    chosen: WorkerKey | None = None
    considered: Sequence[Considered] = ()
    refused: str | None = None


class DecisionLog:
    def __init__(self, capacity: int) -> None:
        self._ring: deque[Decision] = deque(maxlen=capacity)
        self._by_request: dict[str, list[Decision]] = {}

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, decision: Decision) -> None:
        if len(self._ring) == self._ring.maxlen:
            self._forget(self._ring[0])
        self._ring.append(decision)
        self._by_request.setdefault(decision.request_id, []).append(decision)

    def explain(self, request_id: str) -> list[dict[str, Any]]:
        """All decisions on one request, oldest first; empty when it is unknown or too old."""
        return [_plain(decision) for decision in self._by_request.get(request_id, ())]

    def recent(self, count: int) -> list[dict[str, Any]]:
        """The latest decisions, newest first."""
        newest = reversed(self._ring)
        return [_plain(decision) for decision, _ in zip(newest, range(count), strict=False)]

    def _forget(self, decision: Decision) -> None:
        # decisions leave in the order in which they came, so it is the first of its request
        kept = self._by_request[decision.request_id]
        kept.pop(0)
        if not kept:
            del self._by_request[decision.request_id]


def _plain(decision: Decision) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "request_id": decision.request_id,
        "attempt": decision.attempt,
        "router_id": decision.router_id,
        "model": decision.model,
        "at": decision.at,
        "waited_s": decision.waited_s,
        "policy": decision.policy,
        "worker_id": decision.chosen.worker_id if decision.chosen else None,
        "incarnation": decision.chosen.incarnation if decision.chosen else None,
        "refused": decision.refused,
        "considered": [_candidate(each, decision.demand) for each in decision.considered],
    }
    if decision.demand is not None:
        plain |= {
            "prompt_tokens": decision.demand.prompt_tokens,
            "expected_tokens": decision.demand.expected_tokens,
            "n": decision.demand.n,
        }
        chosen = [each for each in decision.considered if each.view.key == decision.chosen]
        plain["hit_tokens"] = chosen[0].view.cached_tokens(decision.demand, chosen[0].hit) if chosen else 0
    return plain


def _candidate(candidate: Considered, demand: Demand | None) -> dict[str, Any]:
    view, cost = candidate.view, candidate.cost
    return {
        "worker_id": view.key.worker_id,
        "incarnation": view.key.incarnation,
        "hit_tokens": view.cached_tokens(demand, candidate.hit) if demand else 0,
        "queued_prefill_tokens": view.load.prefill_tokens,
        "sequences": view.load.sequences,
        "headroom_blocks": view.headroom_blocks,
        "cost_s": {
            "start": cost.start,
            "restore": cost.restore,
            "compute": cost.compute,
            "slowdown": cost.slowdown,
            "total": cost.total,
        },
    }

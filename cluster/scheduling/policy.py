"""How a worker is chosen among those that can take a request. Pure: (views, demand, hits, rng) -> Choice.

Ties fall at random, or equal views would all send their burst to the first. Reservation is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

import msgspec

from .config import PolicyName
from .cost import Cost, cost_of
from .view import NO_HIT, Demand, Hit, WorkerKey, WorkerView

Hits = Mapping[WorkerKey, Hit]


class Considered(msgspec.Struct, frozen=True, gc=False):
    """One candidate with what was known and what it would have cost."""

    view: WorkerView
    hit: Hit
    cost: Cost


class Choice(msgspec.Struct, frozen=True, gc=False):
    chosen: Considered
    considered: Sequence[Considered]


class Policy(Protocol):
    @property
    def name(self) -> PolicyName: ...

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> Choice:
        """Pick one of `views`, which is not empty."""
        ...


class CostPolicy:
    """Least predicted seconds, for the request and for everybody it would join."""

    name: PolicyName = "cost"

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> Choice:
        considered = _consider(views, demand, hits)
        return Choice(_least(considered, [each.cost.total for each in considered], rng), considered)


class RoundRobin:
    """The worker that was placed on longest ago; for comparison."""

    name: PolicyName = "round-robin"

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> Choice:
        considered = _consider(views, demand, hits)
        return Choice(_least(considered, [view.last_placed for view in views], rng), considered)


class LeastLoad:
    """Fewest sequences, blind to prefixes; for comparison."""

    name: PolicyName = "least-load"

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> Choice:
        considered = _consider(views, demand, hits)
        return Choice(_least(considered, [view.load.sequences for view in views], rng), considered)


class PrefixOnly:
    """Most cached tokens, blind to load unless nobody holds anything; for comparison."""

    name: PolicyName = "prefix-only"

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> Choice:
        considered = _consider(views, demand, hits)
        most = max(each.hit.blocks for each in considered)
        holders = [each for each in considered if each.hit.blocks == most]
        if most:
            return Choice(rng.choice(holders), considered)
        return Choice(_least(considered, [view.load.sequences for view in views], rng), considered)


POLICIES: dict[PolicyName, type[Policy]] = {
    "cost": CostPolicy,
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "prefix-only": PrefixOnly,
}


def _consider(views: Sequence[WorkerView], demand: Demand, hits: Hits) -> list[Considered]:
    considered = []
    for view in views:
        hit = hits.get(view.key, NO_HIT)
        considered.append(Considered(view, hit, cost_of(view, demand, hit)))
    return considered


def _least(considered: Sequence[Considered], scores: Sequence[float], rng: Random) -> Considered:
    best = min(scores)
    tied = [each for each, score in zip(considered, scores, strict=True) if score == best]
    return tied[0] if len(tied) == 1 else rng.choice(tied)

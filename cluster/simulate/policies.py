"""Which placement policies a simulation can be asked for, by name."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from ..scheduling.cost import cost_of, mean_running
from ..scheduling.policy import POLICIES, Hits, Policy, least
from ..scheduling.view import NO_HIT, Demand, WorkerView
from .peers import DynamoKv, LlmdScorers, SglangCacheAware

PEERS: dict[str, type[Policy]] = {
    "sglang": SglangCacheAware,
    "dynamo": DynamoKv,
    "llm-d": LlmdScorers,
}


class WeightedCost:
    """The cost policy with a worker's load (its queue, and those that run there) weighted against all else.

    Weight 1 is the cost policy; 0 looks at caches alone, and the higher the less they count: the points of a
    frontier.
    """

    def __init__(self, weight: float) -> None:
        self.name = f"cost:{weight:g}"
        self._weight = weight

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> WorkerView:
        mean = mean_running(views)
        return least(views, [self._cost(view, demand, hits, mean) for view in views], rng)

    def _cost(self, view: WorkerView, demand: Demand, hits: Hits, mean: float) -> float:
        hit = hits.get(view.key, NO_HIT)
        cost = cost_of(view, demand, hit, mean)
        # of what is slowed down, those that run there are the load
        load = cost.start + cost_of(view, demand, hit, 0.0).slowdown
        return cost.total + (self._weight - 1) * load


class Named(NamedTuple):
    """late_binding: whether requests wait in the scheduler until a worker has room, or in workers."""

    policy: Policy
    late_binding: bool


class UnknownPolicy(ValueError):
    """The message lists those there are."""


def find_policy(name: str) -> Named:
    """A fresh policy: one of ours, a peer's, or cost:WEIGHT. Raises UnknownPolicy."""
    if name in POLICIES:
        return Named(POLICIES[name](), True)
    if name in PEERS:
        return Named(PEERS[name](), False)
    kind, _, weight = name.partition(":")
    try:
        if kind == "cost" and float(weight) >= 0:
            return Named(WeightedCost(float(weight)), True)
    except ValueError:
        pass
    names = ", ".join((*POLICIES, *PEERS))
    raise UnknownPolicy(f"--policy {name} is none of {names}, nor cost:WEIGHT")

"""How a worker is chosen among those that can take a request. Pure: (views, demand, hits, rng) -> view.

Ties fall at random, or equal views would all send their burst to the first. Reservation is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .candidates import Candidates
from .config import PolicyName
from .cost import total_costs
from .view import NO_HIT, Demand, WorkerView
from .view import Hits as Hits


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, views: Candidates, demand: Demand, hits: Hits, rng: Random) -> WorkerView:
        """Pick one of `views`, which is not empty."""
        ...


class CostPolicy:
    """Least predicted seconds, for the request and for everybody it would join."""

    name: PolicyName = "cost"

    def choose(self, views: Candidates, demand: Demand, hits: Hits, rng: Random) -> WorkerView:
        return least(views, total_costs(views, demand, hits), rng)


class RoundRobin:
    """The worker that was placed on longest ago; for comparison."""

    name: PolicyName = "round-robin"

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> WorkerView:
        return least(views, [view.last_placed for view in views], rng)


class LeastLoad:
    """Fewest sequences, blind to prefixes; for comparison."""

    name: PolicyName = "least-load"

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> WorkerView:
        return least(views, [view.load.sequences for view in views], rng)


class PrefixOnly:
    """Most cached blocks, blind to load unless nobody holds anything; for comparison."""

    name: PolicyName = "prefix-only"

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> WorkerView:
        misses = [-hits.get(view.key, NO_HIT).blocks for view in views]
        if any(misses):
            return least(views, misses, rng)
        return least(views, [view.load.sequences for view in views], rng)


POLICIES: dict[PolicyName, type[Policy]] = {
    "cost": CostPolicy,
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "prefix-only": PrefixOnly,
}


def least(views: Sequence[WorkerView], scores: npt.ArrayLike, rng: Random) -> WorkerView:
    column = np.asarray(scores)
    first = int(column.argmin())
    best = column == column[first]
    if np.count_nonzero(best) == 1:
        return views[first]
    return views[rng.choice(np.flatnonzero(best).tolist())]

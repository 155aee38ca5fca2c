"""Requests that no worker can take now. Bounded; per model and priority class one line per tenant.

A priority class goes before all that are less urgent; in a class the tenant goes first that was served
least (`fair_share`); of a tenant's requests the one with the earliest deadline, then who came first. Places
nothing itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator

import msgspec

from decodefleet.worker.protocol import Place

from .chain import Chain
from .fair_share import FairShare
from .reservations import RequestKey
from .view import Demand

_NEVER = float("inf")

Urgency = tuple[int, bool]


class Waiter(msgspec.Struct, frozen=True):
    """One request between Place and its answer.

    deadline: on the scheduler's clock; None for never. resumed: its client has read a part of the answer.
    """

    key: RequestKey
    place: Place
    demand: Demand
    chain: Chain
    arrived: float
    number: int
    deadline: float | None = None
    resumed: bool = False

    @property
    def urgency(self) -> Urgency:
        """Lower goes first, as in vLLM; of one priority, those whose client has stopped in mid-sentence."""
        return self.place.priority, not self.resumed

    @property
    def rank(self) -> tuple[float, int]:
        """Within its tenant's line: lower goes first."""
        return (_NEVER if self.deadline is None else self.deadline), self.number


Classes = dict[Urgency, dict[str, list[Waiter]]]


class WaitQueue:
    """limit: of those that wait for one model."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._shares: dict[str, FairShare] = {}
        self._models: dict[str, Classes] = {}
        self._all: dict[RequestKey, Waiter] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._all.values())

    def get(self, key: RequestKey) -> Waiter | None:
        return self._all.get(key)

    def models(self) -> list[str]:
        return list(self._models)

    def classes(self, model: str) -> Classes:
        """Lines by urgency and tenant, for reading."""
        return self._models.get(model, {})

    def ahead(self, waiter: Waiter) -> int:
        """How many of its own tenant's line go before a waiter."""
        line = self.classes(waiter.place.model).get(waiter.urgency, {}).get(waiter.place.tenant, [])
        return bisect_left(line, waiter.rank, key=_rank)

    def share(self, model: str) -> FairShare:
        """What tenants were served of a model; outlives what waits."""
        share = self._shares.get(model)
        if share is None:
            share = self._shares[model] = FairShare()
        return share

    def next(
        self, model: str, passed: Collection[RequestKey] = (), held_back: Collection[str] = ()
    ) -> Waiter | None:
        """Who is to be placed now, but for waiters that are `passed` over and tenants that are held back."""
        classes, counter = self._models.get(model, {}), self.share(model).counter
        for urgency in sorted(classes):
            heads = [
                head
                for tenant, line in classes[urgency].items()
                if tenant not in held_back
                and (head := next((each for each in line if each.key not in passed), None))
            ]
            if heads:
                return min(heads, key=lambda head: (counter(head.place.tenant), head.rank))
        return None

    def full(self, model: str) -> bool:
        """Whether more wait than may, the latest included."""
        return self._counts[model] > self.limit

    def who_yields(self, waiter: Waiter) -> Waiter:
        """Who leaves a full queue for the latest: the last of those who are less urgent, or else of the
        tenant that has more waiting than the latest one's, by weight; or else the latest itself.

        So nobody fills the queue for others. Who is in the middle of an answer never yields.
        """
        classes = self.classes(waiter.place.model)
        fresh = [urgency for urgency in classes if urgency[1]]
        least_urgent = max(fresh, default=waiter.urgency)
        if least_urgent > waiter.urgency:
            return max(classes[least_urgent].values(), key=len)[-1]
        share, lines = self.share(waiter.place.model), classes[waiter.urgency]

        def crowd(tenant: str) -> float:
            return len(lines[tenant]) / share.weight(tenant)

        longest = max(lines, key=crowd)
        return lines[longest][-1] if crowd(longest) > crowd(waiter.place.tenant) else waiter

    def push(self, waiter: Waiter) -> None:
        self._all[waiter.key] = waiter
        self._counts[waiter.place.model] += 1
        self.share(waiter.place.model).arrives(waiter.place.tenant)
        tenants = self._models.setdefault(waiter.place.model, {}).setdefault(waiter.urgency, {})
        insort(tenants.setdefault(waiter.place.tenant, []), waiter, key=_rank)

    def remove(self, key: RequestKey) -> Waiter | None:
        waiter = self._all.pop(key, None)
        if waiter is not None:
            self._leave_line(waiter)
            self._counts[waiter.place.model] -= 1
            self.share(waiter.place.model).leaves(waiter.place.tenant)
        return waiter

    def remove_router(
        self, router_id: str, keep: Collection[str] = (), arrived_before: float = float("inf")
    ) -> list[Waiter]:
        gone = [
            waiter
            for key, waiter in self._all.items()
            if key.router_id == router_id and key.request_id not in keep and waiter.arrived < arrived_before
        ]
        for waiter in gone:
            self.remove(waiter.key)
        return gone

    def forget_idle(self, now: float) -> None:
        """Bounds what is remembered of tenants and models that come no more."""
        for model, share in tuple(self._shares.items()):
            share.forget_idle(now)
            if not len(share):
                del self._shares[model]
                self._counts.pop(model, None)

    def _leave_line(self, waiter: Waiter) -> None:
        place = waiter.place
        classes = self._models[place.model]
        tenants = classes[waiter.urgency]
        line = tenants[place.tenant]
        del line[bisect_left(line, waiter.rank, key=_rank)]
        # nothing empty stays behind: models, classes and tenants come and go
        if not line:
            del tenants[place.tenant]
            if not tenants:
                del classes[waiter.urgency]
                if not classes:
                    del self._models[place.model]

    def check_integrity(self) -> None:
        """Every waiter stands in exactly one line, in order; no line is empty."""
        lined: list[Waiter] = []
        for model, classes in self._models.items():
            for urgency, tenants in classes.items():
                for tenant, line in tenants.items():
                    assert line, f"an empty line of {tenant!r} for {model}"
                    assert [w.rank for w in line] == sorted(w.rank for w in line)
                    assert all(
                        (w.place.model, w.urgency, w.place.tenant) == (model, urgency, tenant) for w in line
                    )
                    lined += line
            for tenant in {tenant for tenants in classes.values() for tenant in tenants}:
                count = sum(len(tenants.get(tenant, ())) for tenants in classes.values())
                assert self.share(model).waiting(tenant) == count, f"{tenant!r} waits {count} times"
        assert {waiter.key for waiter in lined} == set(self._all)
        assert len(lined) == len(self._all)
        fresh = Counter(waiter.place.model for waiter in lined if not waiter.resumed)
        assert max(fresh.values(), default=0) <= self.limit
        assert +self._counts == Counter(waiter.place.model for waiter in lined)


def _rank(waiter: Waiter) -> tuple[float, int]:
    return waiter.rank

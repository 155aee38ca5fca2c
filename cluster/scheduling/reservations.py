"""The ledger of what is promised to whom: one reservation per placed request, and its sums per worker.

A reservation lives from the placement to Release, and never longer than its worker's incarnation or its
router. Knows nothing of reports, costs or queues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

import msgspec

from decodefleet.worker.protocol import Placement

from .view import NO_LOAD, Demand, Load, WorkerKey


class RequestKey(NamedTuple):
    """Clients may choose request ids, so that they are unique per router only."""

    router_id: str
    request_id: str


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """load: what is still promised; its prefill part ends with Started. marks: of its prompt's `Chain`."""

    key: RequestKey
    worker: WorkerKey
    placement: Placement
    tenant: str
    demand: Demand
    load: Load
    placed_at: float
    started: bool = False
    marks: tuple[bytes, ...] = ()


class Ledger:
    def __init__(self) -> None:
        self._all: dict[RequestKey, Reservation] = {}
        self._sums: dict[WorkerKey, Load] = {}
        self._by_worker: dict[WorkerKey, set[RequestKey]] = {}
        self._by_model: dict[str, Counter[str]] = {}
        self._requests: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._all.values())

    def get(self, key: RequestKey) -> Reservation | None:
        return self._all.get(key)

    def load(self, worker: WorkerKey) -> Load:
        return self._sums.get(worker, NO_LOAD)

    def count(self, worker: WorkerKey) -> int:
        return len(self._by_worker.get(worker, ()))

    def sequences(self, model: str) -> Counter[str]:
        """Sequences of a model that are promised, by tenant."""
        return self._by_model.get(model, Counter())

    def requests(self, model: str) -> int:
        """Requests of a model that are promised, each with all its sequences."""
        return self._requests[model]

    def reserve(self, reservation: Reservation) -> None:
        """Raises ValueError where the request holds one already."""
        if reservation.key in self._all:
            raise ValueError(f"{reservation.key}: reserved twice")
        self._all[reservation.key] = reservation
        self._by_worker.setdefault(reservation.worker, set()).add(reservation.key)
        self._sums[reservation.worker] = self.load(reservation.worker) + reservation.load
        demand = reservation.demand
        self._by_model.setdefault(demand.model, Counter())[reservation.tenant] += demand.n
        self._requests[demand.model] += 1

    def start(self, key: RequestKey) -> Reservation | None:
        """The prefill is computed. None where there is nothing to change."""
        held = self._all.get(key)
        if held is None or held.started:
            return None
        done = Load(prefill_tokens=held.load.prefill_tokens)
        started = msgspec.structs.replace(held, started=True, load=held.load - done, marks=())
        self._all[key] = started
        self._sums[held.worker] = self.load(held.worker) - done
        return held

    def release(self, key: RequestKey) -> Reservation | None:
        held = self._all.pop(key, None)
        if held is None:
            return None
        keys = self._by_worker[held.worker]
        keys.remove(key)
        if keys:
            self._sums[held.worker] = self.load(held.worker) - held.load
        else:
            del self._by_worker[held.worker], self._sums[held.worker]
        self._leave_model(held)
        return held

    def _leave_model(self, held: Reservation) -> None:
        self._requests[held.demand.model] -= 1
        tenants = self._by_model[held.demand.model]
        tenants[held.tenant] -= held.demand.n
        if not tenants[held.tenant]:
            del tenants[held.tenant]
            if not tenants:
                del self._by_model[held.demand.model], self._requests[held.demand.model]

    def drop_worker(self, worker: WorkerKey) -> list[Reservation]:
        return self._drop(tuple(self._by_worker.get(worker, ())))

    def drop_router(
        self, router_id: str, keep: Collection[str] = (), placed_before: float = float("inf")
    ) -> list[Reservation]:
        """Drop what a router holds, but for request ids in `keep` and placements too fresh to judge."""
        return self._drop(
            [
                key
                for key, held in self._all.items()
                if key.router_id == router_id
                and key.request_id not in keep
                and held.placed_at < placed_before
            ]
        )

    def _drop(self, keys: Collection[RequestKey]) -> list[Reservation]:
        return [held for key in keys if (held := self.release(key)) is not None]

    def check_integrity(self, live: Collection[WorkerKey]) -> None:
        """Sums equal their parts, nothing is negative, and every worker with reservations is live."""
        sums: dict[WorkerKey, Load] = {}
        tenants: dict[str, Counter[str]] = {}
        requests = Counter(held.demand.model for held in self._all.values())
        for key, held in self._all.items():
            assert held.key == key
            assert held.load == held.load.beyond(NO_LOAD), f"negative reservation {held}"
            assert not (held.started and held.load.prefill_tokens), f"started with prefill {held}"
            sums[held.worker] = sums.get(held.worker, NO_LOAD) + held.load
            tenants.setdefault(held.demand.model, Counter())[held.tenant] += held.demand.n
        assert tenants == self._by_model, "sequences by tenant differ from their parts"
        assert requests == self._requests, "requests by model differ from their parts"
        assert sums == self._sums, "sums differ from their parts"
        keys = {key for held in self._by_worker.values() for key in held}
        assert keys == set(self._all), "reservations and the per-worker index differ"
        assert set(sums) <= set(live), "a reservation on a worker that is not there"

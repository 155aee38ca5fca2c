"""Picks a worker and reserves on it in one step, and keeps the books of workers in step with each other.

Fleet (who is there), ledger (what is promised) and index (who holds what) change together, here only.
Knows nothing of who waits, nor why a request is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from decodefleet.worker.protocol import Placement

from .config import SchedulingConfig
from .cost import cost_of
from .decisions import Decision, DecisionLog
from .fleet import Fleet, Member
from .policy import Policy
from .prefix_index import PrefixIndex
from .queue import Waiter
from .reservations import Ledger, RequestKey, Reservation
from .view import NO_HIT, Hit, WorkerKey, WorkerView


class Placer:
    """epoch: of the scheduler, told to workers. seed: of the random choice among equals.

    directory_up is set from outside: while no directory confirms what workers hold, dispatched prefixes
    are remembered for longer.
    """

    def __init__(self, epoch: int, config: SchedulingConfig, policy: Policy, seed: int | None) -> None:
        self.config = config
        self.fleet = Fleet(config.worker_timeout_s)
        self.ledger = Ledger()
        self.index = PrefixIndex(config.max_index_blocks)
        self.log = DecisionLog(config.decision_log)
        self.policy = policy
        self.directory_up = False
        self.placements = 0
        self._epoch = epoch
        self._rng = Random(seed)

    def place(self, waiter: Waiter, candidates: Sequence[Member], now: float) -> Placement | None:
        """Pick and reserve, or None when no worker can take the request now."""
        if not candidates:
            return None
        demand = waiter.demand
        hits = self.index.hits(waiter.hashes)
        views = [each.view or self.fleet.view(each, self.ledger.load(each.key)) for each in candidates]
        if self.config.late_binding:
            views = [view for view in views if view.fits(demand, hits.get(view.key, NO_HIT))]
        if not views:
            return None
        chosen = self.policy.choose(views, demand, hits, self._rng)
        self.log.add(
            Decision.on(waiter, now, self.policy.name, chosen=chosen.key, considered=views, hits=hits)
        )
        return self._reserve(waiter, chosen, hits.get(chosen.key, NO_HIT), now)

    def start(self, key: RequestKey, attempt: int) -> None:
        """The first token came: its prefill burdens the worker no longer, and its blocks are there."""
        held = self.ledger.get(key)
        if held is not None and held.placement.attempt == attempt:
            self.ledger.start(key)
            self.fleet.touch(held.worker)
            self.index.dispatched(held.worker, held.hashes)

    def give_back(self, key: RequestKey, now: float) -> None:
        held = self.ledger.release(key)
        if held is not None:
            self.fleet.ended(held.worker, held.load, now)

    def forget(self, dropped: Iterable[Reservation]) -> None:
        """Reservations that ended without their worker's doing."""
        for held in dropped:
            self.fleet.touch(held.worker)

    def remove_worker(self, key: WorkerKey, now: float) -> None:
        """Its reservations go with it: the routers notice and ask again."""
        self.fleet.remove(key, now)
        self.ledger.drop_worker(key)
        if not self.directory_up:
            self.index.clear(key)

    def tick(self, now: float) -> None:
        config = self.config
        memory_s = config.speculative_ttl_s if self.directory_up else config.memory_ttl_s
        if self.index.tick(now, memory_s):
            for held in self.ledger:
                self.index.dispatched(held.worker, held.hashes)

    def check_integrity(self) -> None:
        self.ledger.check_integrity(self.fleet.keys())
        self.index.check_integrity()

    def _reserve(self, waiter: Waiter, view: WorkerView, hit: Hit, now: float) -> Placement:
        placement = Placement(
            request_id=waiter.key.request_id,
            attempt=waiter.place.attempt,
            worker_id=view.key.worker_id,
            incarnation=view.key.incarnation,
            endpoint=view.endpoint,
            epoch=self._epoch,
            predicted_s=cost_of(view, waiter.demand, hit).first_token_s,
            cached_tokens=view.cached_tokens(waiter.demand, hit),
            waited_s=now - waiter.arrived,
        )
        self.placements += 1
        self.ledger.reserve(
            Reservation(
                key=waiter.key,
                worker=view.key,
                placement=placement,
                model=waiter.place.model,
                n=waiter.demand.n,
                load=view.load_of(waiter.demand, hit),
                placed_at=now,
                hashes=waiter.hashes,
            )
        )
        self.fleet.placed(view.key, self.placements)
        self.index.dispatched(view.key, waiter.hashes)
        return placement

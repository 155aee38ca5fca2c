"""Picks a worker and reserves on it in one step, and keeps the books of workers in step with each other.

Fleet (who is there), ledger (what is promised) and index (who holds what) change together, here only.
Knows nothing of who waits, nor why a request is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import numpy as np

from decodefleet.worker.protocol import Placement

from . import refusals
from .candidates import Candidates, with_room
from .config import SchedulingConfig
from .cost import cost_of, total_costs, usable
from .decisions import Decision, DecisionLog
from .fleet import Fleet, Member
from .peers import Lender, best_lender, peer_of, with_lender, worth_asking
from .policy import Hits, Policy
from .prefix_index import PrefixIndex
from .queue import Waiter
from .refusals import Refused
from .reservations import Ledger, RequestKey, Reservation
from .sessions import Sessions, worth_returning
from .view import NO_HIT, Demand, Hit, WorkerKey, WorkerView

# who predicts this many times the time that is left is believed
CERTAIN = 2.0
# of the prompts that wait in workers, so many are told to the index again at each tick
_RENEWED = 256


class Placer:
    """epoch: of the scheduler, told to workers. seed: of the random choice among equals.

    directory_up is set from outside: while no directory confirms what workers hold, dispatched prefixes
    are remembered for longer.
    """

    def __init__(self, epoch: int, config: SchedulingConfig, policy: Policy, seed: int | None) -> None:
        self.config = config
        self.ledger = Ledger()
        self.fleet = Fleet(config.worker_timeout_s, self.ledger.load, sleeps=config.sleeps)
        self.index = PrefixIndex(config.max_index_blocks)
        self.log = DecisionLog(config.decision_log)
        self.policy = policy
        self.directory_up = False
        self.placements = 0
        self._to_renew: list[RequestKey] = []
        self._sessions = Sessions(config.max_sessions)
        self._epoch = epoch
        self._rng = Random(seed)

    def free_sequences(self, allowed: Sequence[Member], demand: Demand) -> float:
        """How many more sequences like a request's there is room for."""
        return sum(self.fleet.view(member).free_sequences(demand) for member in allowed)

    def step_s(self, allowed: Sequence[Member]) -> float:
        """Seconds of a decode step, on average."""
        return sum(self.fleet.view(member).step_s for member in allowed) / len(allowed)

    def place(self, waiter: Waiter, allowed: Sequence[Member], now: float) -> Reservation | Refused | None:
        """Pick and reserve; None when no worker can take the request now; refused when none can in time.

        allowed: of those that serve its model, at least one.
        """
        demand = waiter.demand
        hits = self.index.hits(waiter.chain)
        views = self._candidates(demand.model, allowed, now)
        if self.config.late_binding:
            views = with_room(views, demand, hits, self.config.bind_ahead_s)
        if not views:
            return None
        best = self.policy.choose(views, demand, hits, self._rng)
        lender = self._lender(best, views, waiter, hits, now)
        if lender is not None:
            hits = with_lender(views, hits, lender)
            best = self.policy.choose(views, demand, hits, self._rng)
        chosen = self._session_worker(waiter, views, hits, best) or best
        hit = usable(chosen, hits.get(chosen.key, NO_HIT))
        cost = cost_of(chosen, demand, hit)
        if waiter.deadline is not None and now + cost.first_token_s > waiter.deadline:
            soonest = min(cost_of(view, demand, hits.get(view.key, NO_HIT)).first_token_s for view in views)
            if now + soonest / CERTAIN > waiter.deadline:
                return refusals.hopeless(soonest, waiter.deadline - now)
        decision = Decision.on(
            waiter,
            now,
            self.policy.name,
            chosen=chosen.key,
            considered=views.views,
            hits=hits,
            returned=chosen is not best,
        )
        self.log.add(decision)
        return self._reserve(waiter, chosen, hit, cost.first_token_s, now, lender)

    def _candidates(self, model: str, allowed: Sequence[Member], now: float) -> Candidates:
        candidates = self.fleet.candidates(model, now)
        if len(allowed) == len(candidates):
            return candidates
        keys = {member.key for member in allowed}
        return candidates.only(np.array([view.key in keys for view in candidates]))

    def _session_worker(
        self, waiter: Waiter, views: Candidates, hits: Hits, best: WorkerView
    ) -> WorkerView | None:
        """Where the session's last request went, if that costs next to nothing more than the best."""
        last = self._sessions.find(waiter.place)
        row = None if last is None or last == best.key else views.rows.get(last)
        if row is None:
            return None
        costs = total_costs(views, waiter.demand, hits)
        return views[row] if worth_returning(costs[row], costs[views.rows[best.key]]) else None

    def start(self, key: RequestKey, attempt: int) -> None:
        """The first token came: its prefill burdens the worker no longer, and its blocks are there."""
        held = self.ledger.get(key)
        if held is not None and held.placement.attempt == attempt:
            self.ledger.start(key)
            self.fleet.touch(held.worker)
            if held.placed_at < self.index.turned_at:
                self.index.dispatched(held.worker, held.marks)

    def give_back(self, key: RequestKey, now: float) -> None:
        held = self.ledger.release(key)
        if held is not None:
            self.fleet.ended(held.worker, held.load, now)

    def forget(self, dropped: Iterable[Reservation]) -> None:
        """Reservations that ended without their worker's doing."""
        for held in dropped:
            self.fleet.touch(held.worker)

    def remove_worker(self, key: WorkerKey, now: float) -> list[Reservation]:
        """Its reservations go with it, and are handed back: the routers notice and ask again."""
        self.fleet.remove(key, now)
        if not self.directory_up:
            self.index.clear(key)
        return self.ledger.drop_worker(key)

    def tick(self, now: float) -> None:
        config = self.config
        memory_s = config.speculative_ttl_s if self.directory_up else config.memory_ttl_s
        if self.index.tick(now, memory_s):
            self._to_renew = [held.key for held in self.ledger if held.marks]
        for _ in range(min(len(self._to_renew), _RENEWED)):
            held = self.ledger.get(self._to_renew.pop())
            if held is not None:
                self.index.dispatched(held.worker, held.marks)

    def check_integrity(self) -> None:
        self.ledger.check_integrity(self.fleet.keys())
        self.index.check_integrity()

    def _lender(
        self, best: WorkerView, views: Candidates, waiter: Waiter, hits: Hits, now: float
    ) -> Lender | None:
        """From whom the others can fetch the prompt's prefix, where that may change the choice.

        Nobody waits for blocks of a worker that failed this very request, which holds most of them, unless it
        failed by draining.
        """

        def endpoint_of(key: WorkerKey) -> str:
            member = self.fleet.find(key)
            if member is None or not member.peer_endpoint:
                return ""
            fence = self.fleet.fence(member, now)
            failed = key.worker_id in waiter.place.exclude
            lends = fence == "draining" or (fence is None and not failed)
            return member.peer_endpoint if lends else ""

        lender = best_lender(hits, endpoint_of) if hits else None
        if lender is None or not worth_asking(best, views, waiter.demand, hits, lender):
            return None
        return lender

    def _reserve(
        self,
        waiter: Waiter,
        view: WorkerView,
        hit: Hit,
        predicted_s: float,
        now: float,
        lender: Lender | None,
    ) -> Reservation:
        placement = Placement(
            request_id=waiter.key.request_id,
            attempt=waiter.place.attempt,
            worker_id=view.key.worker_id,
            incarnation=view.key.incarnation,
            endpoint=view.endpoint,
            epoch=self._epoch,
            predicted_s=predicted_s,
            cached_tokens=view.cached_tokens(waiter.demand, hit),
            waited_s=now - waiter.arrived,
            peer=peer_of(hit, lender),
        )
        self.placements += 1
        reservation = Reservation(
            key=waiter.key,
            worker=view.key,
            placement=placement,
            tenant=waiter.place.tenant,
            demand=waiter.demand,
            load=view.load_of(waiter.demand, hit),
            placed_at=now,
            marks=waiter.chain.marks,
        )
        self.ledger.reserve(reservation)
        self.fleet.placed(view.key, self.placements)
        self.index.dispatched(view.key, waiter.chain.marks)
        self._sessions.note(waiter.place, view.key)
        return reservation

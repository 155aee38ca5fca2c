"""The global scheduler's core: events in, messages out. Synchronous, no I/O, time passed in as `now`.

Each method takes one event and returns what to send to whom. Picking a worker and reserving on it are one
step. The prefix index is fed from outside (`index`); placement works without it. Liveness beats affinity:
what is fenced is no candidate at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from random import Random
from typing import Any, NamedTuple

from decodefleet.worker.protocol import (
    Acknowledge,
    FromScheduler,
    Heartbeat,
    Place,
    Placement,
    Refusal,
    RefusalReason,
    Register,
    Release,
    RouterReport,
    Started,
    Welcome,
)

from . import refusals
from .config import SchedulingConfig
from .cost import cost_of
from .decisions import Decision, DecisionLog
from .fleet import Fleet, Member
from .lengths import OutputLengths
from .policy import POLICIES, Policy
from .prefix_index import PrefixIndex, unpack_hashes
from .queue import Waiter, WaitQueue
from .refusals import Refused
from .reservations import Ledger, RequestKey, Reservation
from .view import NO_HIT, Demand, Hit, WorkerKey, WorkerView


class Outgoing(NamedTuple):
    """A message for one peer, named by its router or worker id."""

    peer: str
    message: FromScheduler


class GlobalScheduler:
    """epoch: grows with every scheduler of a cluster. seed: of the random choice among equals.
    policy: another than `config` names.

    directory_up is set from outside: while no directory confirms what workers hold, dispatched prefixes
    are remembered for longer.
    """

    def __init__(
        self,
        epoch: int,
        config: SchedulingConfig | None = None,
        *,
        seed: int | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.epoch = epoch
        self.config = config or SchedulingConfig()
        self.index = PrefixIndex(self.config.max_index_blocks)
        self.log = DecisionLog(self.config.decision_log)
        self.fleet = Fleet(self.config.worker_timeout_s)
        self.ledger = Ledger()
        self.queue = WaitQueue(self.config.max_queue)
        self.placements = 0
        self.refused: Counter[RefusalReason] = Counter()
        self.directory_up = False
        self._policy: Policy = policy or POLICIES[self.config.policy]()
        self._rng = Random(seed)
        self._lengths = OutputLengths()
        self._retry = refusals.RetryAdvice()
        self._routers: dict[str, float] = {}
        self._welcome = Welcome(epoch=epoch, models=())
        self._arrivals = 0

    @property
    def welcome(self) -> Welcome:
        """What routers were told last."""
        return self._welcome

    @property
    def routers(self) -> tuple[str, ...]:
        return tuple(self._routers)

    def register(self, message: Register, now: float) -> list[Outgoing]:
        """A superseded incarnation gets no answer: it must not take its successor's place."""
        key = WorkerKey(message.worker_id, message.incarnation)
        if self.fleet.superseded(key):
            return []
        current = self.fleet.current(key.worker_id)
        if current is not None and current.key != key:
            self._remove_worker(current.key, now)
            self.index.clear(current.key)
        member = self.fleet.register(message, now)
        self.fleet.report(member, message.stats, self.ledger.load(key), now)
        acknowledge = Outgoing(key.worker_id, Acknowledge(epoch=self.epoch))
        return [acknowledge, *self._news(now), *self._drain(now)]

    def heartbeat(self, message: Heartbeat, now: float) -> list[Outgoing]:
        key = WorkerKey(message.worker_id, message.incarnation)
        member = self.fleet.find(key)
        if member is None:
            if self.fleet.superseded(key):
                return []
            return [Outgoing(key.worker_id, Acknowledge(epoch=self.epoch, known=False))]
        self.fleet.report(member, message.stats, self.ledger.load(key), now)
        return [Outgoing(key.worker_id, Acknowledge(epoch=self.epoch)), *self._drain(now)]

    def hello(self, router_id: str, now: float) -> list[Outgoing]:
        self._routers[router_id] = now
        return [Outgoing(router_id, self._welcome)]

    def place(self, request: Place, router_id: str, now: float) -> list[Outgoing]:
        """Answer with a Placement or a Refusal, or later, when it had to wait.

        A repeated Place of the same attempt gets the same answer; a newer attempt replaces an older one.
        """
        greeting = self._see_router(router_id, now)
        key = RequestKey(router_id, request.request_id)
        held, waiting = self.ledger.get(key), self.queue.get(key)
        if held is not None and held.placement.attempt >= request.attempt:
            same = held.placement.attempt == request.attempt
            return [*greeting, Outgoing(router_id, held.placement)] if same else greeting
        if waiting is not None and waiting.place.attempt >= request.attempt:
            return greeting
        self._give_back(key, now)
        self.queue.remove(key)
        return [*greeting, *self._admit(self._waiter(key, request, now), now)]

    def started(self, message: Started, router_id: str, now: float) -> list[Outgoing]:
        """The first token came: its prefill burdens the worker no longer, and its blocks are there."""
        key = RequestKey(router_id, message.request_id)
        held = self.ledger.get(key)
        if held is not None and held.placement.attempt == message.attempt:
            self.ledger.start(key)
            self.fleet.touch(held.worker)
            self.index.dispatched(held.worker, held.hashes)
        return []

    def release(self, message: Release, router_id: str, now: float) -> list[Outgoing]:
        """Idempotent; withdraws a waiting request too. Late news of an older attempt changes nothing."""
        key = RequestKey(router_id, message.request_id)
        waiting, held = self.queue.get(key), self.ledger.get(key)
        if waiting is not None and waiting.place.attempt <= message.attempt:
            self.queue.remove(key)
        if held is not None and held.placement.attempt <= message.attempt:
            self._give_back(key, now)
            self._lengths.observe(held.model, message.generated, held.n)
            self._retry.released(now)
        return self._drain(now)

    def router_report(self, message: RouterReport, now: float) -> list[Outgoing]:
        """Life sign; what the router does not hold any more is given back, lost Releases or not."""
        router_id, live = message.router_id, frozenset(message.live)
        greeting = self._see_router(router_id, now)
        settled = now - self.config.report_grace_s
        self.queue.remove_router(router_id, live, settled)
        self._forget(self.ledger.drop_router(router_id, live, settled))
        return [*greeting, *self._drain(now)]

    def router_gone(self, router_id: str, now: float) -> list[Outgoing]:
        self._routers.pop(router_id, None)
        self.queue.remove_router(router_id)
        self._forget(self.ledger.drop_router(router_id))
        return self._drain(now)

    def tick(self, now: float) -> list[Outgoing]:
        """Expire workers, routers, waiting requests and index entries; call it many times a second."""
        for member in self.fleet.silent(now):
            self._remove_worker(member.key, now)
        outgoing: list[Outgoing] = []
        for router_id, seen in tuple(self._routers.items()):
            if now - seen > self.config.router_timeout_s:
                outgoing += self.router_gone(router_id, now)
        if self.index.tick(now, self._memory_s):
            for held in self.ledger:
                self.index.dispatched(held.worker, held.hashes)
        outgoing += self._drain(now)
        outgoing += self._refuse_overdue(now)
        return [*outgoing, *self._news(now)]

    def check_integrity(self) -> None:
        """Raises AssertionError where books disagree: reservations, queue, index, and their keys."""
        self.ledger.check_integrity(self.fleet.keys())
        self.queue.check_integrity()
        self.index.check_integrity()
        for held in self.ledger:
            assert self.queue.get(held.key) is None, "both placed and waiting"
            assert held.key.router_id in self._routers, "a reservation of a router that is gone"
        for waiter in self.queue:
            assert waiter.key.router_id in self._routers, "a router that is gone waits"

    @property
    def _memory_s(self) -> float:
        return self.config.speculative_ttl_s if self.directory_up else self.config.memory_ttl_s

    def _see_router(self, router_id: str, now: float) -> list[Outgoing]:
        """A router that outlived a scheduler does not say Hello to the next: greet it all the same."""
        if router_id not in self._routers:
            return self.hello(router_id, now)
        self._routers[router_id] = now
        return []

    def _news(self, now: float) -> list[Outgoing]:
        """Welcome for every router when the models or their readiness have changed."""
        welcome = Welcome(epoch=self.epoch, models=self.fleet.cards, ready=self.fleet.ready(now))
        if welcome == self._welcome:
            return []
        self._welcome = welcome
        return [Outgoing(router_id, welcome) for router_id in self._routers]

    def _waiter(self, key: RequestKey, request: Place, now: float) -> Waiter:
        self._arrivals += 1
        n = max(1, request.n)
        return Waiter(
            key=key,
            place=request,
            demand=Demand(
                model=request.model,
                prompt_tokens=max(1, request.prompt_tokens),
                expected_tokens=self._lengths.expected(request.model, request.max_new_tokens, n),
                n=n,
            ),
            hashes=unpack_hashes(request.block_hashes),
            arrived=now,
            number=self._arrivals,
            deadline=None if request.deadline_s is None else now + request.deadline_s,
        )

    def _admit(self, waiter: Waiter, now: float) -> list[Outgoing]:
        """Place at once, let wait, or refuse."""
        model = waiter.place.model
        card = self.fleet.card(model)
        if card is None:
            # before the first worker registers nobody can say which models there are
            if self.fleet.cards:
                return [self._refuse(waiter, refusals.unknown_model(model), now)]
        elif refused := refusals.too_long(waiter.demand, card):
            return [self._refuse(waiter, refused, now)]
        serving = self.fleet.serving(model, now)
        if not self._stands_behind(waiter, serving, now):
            placement = self._try(waiter, self._allowed(waiter, serving, now), now)
            if placement is not None:
                return [Outgoing(waiter.key.router_id, placement)]
        if card and (refused := refusals.too_large(waiter.demand, card, serving)):
            return [self._refuse(waiter, refused, now)]
        if self.queue.full:
            waiting = len(self.queue)
            return [self._refuse(waiter, refusals.queue_full(waiting, self._retry.after(waiting)), now)]
        self.queue.push(waiter)
        return []

    def _drain(self, now: float) -> list[Outgoing]:
        """Place what waits, in order, as far as there is room."""
        outgoing = []
        for model in self.queue.models():
            serving = self.fleet.serving(model, now)
            for waiter in self.queue.line(model) if serving else ():
                allowed = self._allowed(waiter, serving, now)
                placement = self._try(waiter, allowed, now)
                if placement is not None:
                    self.queue.remove(waiter.key)
                    outgoing.append(Outgoing(waiter.key.router_id, placement))
                elif allowed:
                    break
        return outgoing

    def _stands_behind(self, waiter: Waiter, serving: Sequence[Member], now: float) -> bool:
        """Whether somebody waits who comes first; who only waits out an exclusion holds up nobody."""
        ahead = takewhile(lambda other: other.rank < waiter.rank, self.queue.line(waiter.place.model))
        return any(self._allowed(other, serving, now) for other in ahead)

    def _try(self, waiter: Waiter, candidates: Sequence[Member], now: float) -> Placement | None:
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
        chosen = self._policy.choose(views, demand, hits, self._rng)
        decision = self._decision(waiter, now, chosen=chosen.key, considered=views, hits=hits)
        self.log.add(decision)
        return self._reserve(waiter, chosen, decision.hit(chosen), now)

    def _allowed(self, waiter: Waiter, serving: Sequence[Member], now: float) -> Sequence[Member]:
        """Workers that failed this request are left out until they have restarted or proved to be alive."""
        exclude = waiter.place.exclude
        if not exclude or now - waiter.arrived > self.config.worker_timeout_s:
            return serving
        return [
            member
            for member in serving
            if member.key.worker_id not in exclude or member.registered_at > waiter.arrived
        ]

    def _reserve(self, waiter: Waiter, view: WorkerView, hit: Hit, now: float) -> Placement:
        placement = Placement(
            request_id=waiter.key.request_id,
            attempt=waiter.place.attempt,
            worker_id=view.key.worker_id,
            incarnation=view.key.incarnation,
            endpoint=view.endpoint,
            epoch=self.epoch,
            predicted_s=cost_of(view, waiter.demand, hit).first_token_s,
            cached_tokens=view.cached_tokens(waiter.demand, hit),
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

    def _refuse(self, waiter: Waiter, refused: Refused, now: float) -> Outgoing:
        self.refused[refused.reason] += 1
        self.log.add(self._decision(waiter, now, refused=refused.reason))
        message = Refusal(
            request_id=waiter.key.request_id,
            attempt=waiter.place.attempt,
            reason=refused.reason,
            message=refused.message,
            retry_after_s=refused.retry_after_s,
        )
        return Outgoing(waiter.key.router_id, message)

    def _decision(self, waiter: Waiter, now: float, **outcome: Any) -> Decision:
        return Decision(
            request_id=waiter.key.request_id,
            attempt=waiter.place.attempt,
            router_id=waiter.key.router_id,
            model=waiter.place.model,
            at=now,
            waited_s=now - waiter.arrived,
            policy=self._policy.name,
            demand=waiter.demand,
            **outcome,
        )

    def _refuse_overdue(self, now: float) -> list[Outgoing]:
        grace = self.config.no_worker_grace_s
        away = {model for model in self.queue.models() if not self.fleet.serving(model, now)}
        outgoing = []
        for waiter in tuple(self.queue):
            model = waiter.place.model
            waits_from = max(waiter.arrived, self.fleet.empty_since(model))
            if waiter.deadline is not None and now >= waiter.deadline:
                refused = refusals.deadline_passed(now - waiter.arrived)
            elif model in away and now - waits_from >= grace:
                known = self.fleet.card(model) is not None or not self.fleet.cards
                refused = refusals.no_worker(model, grace) if known else refusals.unknown_model(model)
            else:
                continue
            self.queue.remove(waiter.key)
            outgoing.append(self._refuse(waiter, refused, now))
        return outgoing

    def _remove_worker(self, key: WorkerKey, now: float) -> None:
        """Its reservations go with it: the routers notice and ask again."""
        self.fleet.remove(key, now)
        self.ledger.drop_worker(key)
        if not self.directory_up:
            self.index.clear(key)

    def _give_back(self, key: RequestKey, now: float) -> None:
        held = self.ledger.release(key)
        if held is not None:
            self.fleet.ended(held.worker, held.load, now)

    def _forget(self, dropped: Iterable[Reservation]) -> None:
        for held in dropped:
            self.fleet.touch(held.worker)

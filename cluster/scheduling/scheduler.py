"""The global scheduler's core: events in, messages out. Synchronous, no I/O, time passed in as `now`.

Each method takes one event and returns what to send to whom. Picking a worker and reserving on it are one
step (`placer`); who waits and who is refused is decided apart from it (`admission`). The prefix index is fed
from outside (`index`); placement works without it. Liveness beats affinity: what is fenced is no candidate.
"""

from __future__ import annotations

from collections import Counter

from decodefleet.worker.protocol import (
    Acknowledge,
    Heartbeat,
    Place,
    RefusalReason,
    Register,
    Release,
    RouterReport,
    Started,
    Welcome,
    WorkerBrief,
)

from .admission import Admission
from .config import SchedulingConfig
from .fences import Fences
from .outgoing import Outgoing as Outgoing
from .placer import Placer
from .policy import POLICIES, Policy
from .reservations import RequestKey
from .routers import Routers
from .view import WorkerKey


class GlobalScheduler:
    """epoch: grows with every scheduler of a cluster. seed: of the random choice among equals.
    policy: another than `config` names.
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
        self._placer = Placer(epoch, self.config, policy or POLICIES[self.config.policy](), seed)
        self._admission = Admission(self._placer)
        self.fleet, self.ledger = self._placer.fleet, self._placer.ledger
        self._routers = Routers(epoch, self.config.router_timeout_s, self._briefs)
        self._fences = Fences(self.fleet)
        self.index, self.log = self._placer.index, self._placer.log
        self.queue = self._admission.queue

    @property
    def placements(self) -> int:
        return self._placer.placements

    @property
    def refused(self) -> Counter[RefusalReason]:
        return self._admission.refused

    @property
    def directory_up(self) -> bool:
        """Set from outside: while no directory confirms what workers hold, the index remembers longer."""
        return self._placer.directory_up

    @directory_up.setter
    def directory_up(self, up: bool) -> None:
        self._placer.directory_up = up

    @property
    def welcome(self) -> Welcome:
        """What routers were told last."""
        return self._routers.welcome

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
            self._admission.lost(self._placer.remove_worker(current.key, now))
            self._fences.lose(current.key, "superseded", now)
            self.index.clear(current.key)
        self._fences.readmit(key)
        member = self.fleet.register(message, now)
        self.fleet.report(member, message.stats, now)
        acknowledge = Outgoing(key.worker_id, Acknowledge(epoch=self.epoch))
        return [acknowledge, *self._news(now), *self._admission.drain(now)]

    def heartbeat(self, message: Heartbeat, now: float) -> list[Outgoing]:
        key = WorkerKey(message.worker_id, message.incarnation)
        member = self.fleet.find(key)
        if member is None:
            if self.fleet.superseded(key):
                return []
            return [Outgoing(key.worker_id, Acknowledge(epoch=self.epoch, known=False))]
        self.fleet.report(member, message.stats, now)
        return [Outgoing(key.worker_id, Acknowledge(epoch=self.epoch)), *self._admission.drain(now)]

    def hello(self, router_id: str, now: float) -> list[Outgoing]:
        return self._routers.greet(router_id, now)

    def place(self, request: Place, router_id: str, now: float) -> list[Outgoing]:
        """Answer with a Placement or a Refusal, or later, when it had to wait.

        A repeated Place of the same attempt gets the same answer; a newer attempt replaces an older one.
        """
        greeting = self._routers.see(router_id, now)
        key = RequestKey(router_id, request.request_id)
        held, waiting = self.ledger.get(key), self.queue.get(key)
        if held is not None and held.placement.attempt >= request.attempt:
            same = held.placement.attempt == request.attempt
            return [*greeting, Outgoing(router_id, held.placement)] if same else greeting
        if waiting is not None and waiting.place.attempt >= request.attempt:
            return greeting
        self._placer.give_back(key, now)
        self.queue.remove(key)
        return [*greeting, *self._admission.admit(key, request, now)]

    def started(self, message: Started, router_id: str, now: float) -> list[Outgoing]:
        """The first token came: its worker may have time for more."""
        self._placer.start(RequestKey(router_id, message.request_id), message.attempt)
        return self._admission.drain(now)

    def release(self, message: Release, router_id: str, now: float) -> list[Outgoing]:
        """Idempotent; withdraws a waiting request too. Late news of an older attempt changes nothing."""
        key = RequestKey(router_id, message.request_id)
        waiting, held = self.queue.get(key), self.ledger.get(key)
        if waiting is not None and waiting.place.attempt <= message.attempt:
            self.queue.remove(key)
        if held is not None and held.placement.attempt <= message.attempt:
            self._placer.give_back(key, now)
            self._admission.ended(held, message.generated)
        return self._admission.drain(now)

    def router_report(self, message: RouterReport, now: float) -> list[Outgoing]:
        """Life sign; what the router does not hold any more is given back, lost Releases or not."""
        router_id, live = message.router_id, frozenset(message.live)
        greeting = self._routers.see(router_id, now)
        settled = now - self.config.report_grace_s
        self.queue.remove_router(router_id, live, settled)
        self._placer.forget(self.ledger.drop_router(router_id, live, settled))
        return [*greeting, *self._admission.drain(now)]

    def router_gone(self, router_id: str, now: float) -> list[Outgoing]:
        self._routers.forget(router_id)
        self.queue.remove_router(router_id)
        self._placer.forget(self.ledger.drop_router(router_id))
        return self._admission.drain(now)

    def tick(self, now: float) -> list[Outgoing]:
        """Expire workers, routers, waiting requests and index entries; call it many times a second."""
        for member in self.fleet.silent(now):
            self._admission.lost(self._placer.remove_worker(member.key, now))
            self._fences.lose(member.key, "silent", now)
        outgoing: list[Outgoing] = []
        for router_id in self._routers.silent(now):
            outgoing += self.router_gone(router_id, now)
        self._placer.tick(now)
        outgoing += self._admission.drain(now)
        outgoing += self._admission.tick(now)
        return [*outgoing, *self._news(now)]

    def check_integrity(self) -> None:
        """Raises AssertionError where books disagree: reservations, queue, index, and their keys."""
        self._placer.check_integrity()
        self.queue.check_integrity()
        for held in self.ledger:
            assert self.queue.get(held.key) is None, "both placed and waiting"
            assert held.key.router_id in self._routers, "a reservation of a router that is gone"
        for waiter in self.queue:
            assert waiter.key.router_id in self._routers, "a router that is gone waits"

    def _news(self, now: float) -> list[Outgoing]:
        return self._routers.tell(self.fleet, self._fences.told(now), now)

    def _briefs(self, now: float) -> tuple[WorkerBrief, ...]:
        return tuple(
            WorkerBrief(
                worker_id=member.key.worker_id,
                incarnation=member.key.incarnation,
                endpoint=member.endpoint,
                model=member.card.name,
                sequences=self.fleet.view(member).load.sequences,
                max_running=member.stats.max_running,
            )
            for member in self.fleet
            if self.fleet.fence(member, now) is None
        )

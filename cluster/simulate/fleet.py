"""A simulated worker as the scheduler meets it: it registers, reports late, publishes late, and goes.

Between `SimulatedWorker` and `GlobalScheduler`, both of them real. Owns one worker's timers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from decodefleet.worker.config import BatchConfig
from decodefleet.worker.protocol import Heartbeat, ModelCard, Register, WorkerStats

from ..scheduling.scheduler import GlobalScheduler, Outgoing
from ..scheduling.view import WorkerKey
from .arrivals import Arrival
from .events import Events
from .machine import Machine
from .worker import Listener, SimulatedWorker

MODEL = "model"
# an idle worker with no news reports less often; it must be heard within the scheduler's timeout
IDLE_REPORTS = 8


class Delays(NamedTuple):
    """Seconds. heartbeat: between reports. directory: from a block's change until the scheduler knows it."""

    heartbeat: float = 0.25
    directory: float = 0.03


class Member:
    """since, until: when it was ordered and when it went; None while it is there."""

    def __init__(
        self,
        worker_id: str,
        worker: SimulatedWorker,
        card: ModelCard,
        scheduler: GlobalScheduler,
        events: Events,
        delays: Delays,
        deliver: Callable[[list[Outgoing]], None],
    ) -> None:
        self.key = WorkerKey(worker_id, "1")
        self.worker = worker
        self.since = events.now
        self.until: float | None = None
        self.draining = False
        self._card = card
        self._scheduler, self._events, self._delays = scheduler, events, delays
        self._deliver = deliver
        self._last = WorkerStats()
        self._skipped = 0
        self._woken_for: float | None = None
        self._news_due = False

    def register(self, phase: float) -> None:
        """phase: share of the heartbeat's interval by which its reports are shifted."""
        message = Register(
            worker_id=self.key.worker_id,
            incarnation=self.key.incarnation,
            endpoint=self.key.worker_id,
            card=self._card,
            stats=self.worker.stats(self._events.now),
        )
        self._deliver(self._scheduler.register(message, self._events.now))
        interval = self._delays.heartbeat
        self._events.every(interval, self._events.now + interval * phase, self._report)

    def submit(self, number: int, arrival: Arrival) -> None:
        self.worker.submit(number, arrival, self._events.now)
        self._wake_later()

    def drain(self) -> None:
        self.draining = True
        self._skipped = IDLE_REPORTS
        self._report()

    def leave(self) -> None:
        """The process ends: it reports no more, and its blocks are gone."""
        self.until = self._events.now
        self._scheduler.index.clear(self.key)

    def _report(self) -> bool:
        if self.until is not None:
            return False
        stats = self.worker.stats(self._events.now)
        if self.draining:
            stats = msgspec.structs.replace(stats, draining=True)
        self._skipped += 1
        if stats != self._last or self._skipped >= IDLE_REPORTS:
            self._last, self._skipped = stats, 0
            message = Heartbeat(worker_id=self.key.worker_id, incarnation=self.key.incarnation, stats=stats)
            self._deliver(self._scheduler.heartbeat(message, self._events.now))
        return True

    def _wake_later(self) -> None:
        due = self.worker.wakes_at
        if due is not None and due != self._woken_for:
            self._woken_for = due
            self._events.at(due, lambda: self._wake(due))

    def _wake(self, due: float) -> None:
        # steps under way were cut short since: another call is due
        if self._woken_for != due:
            return
        self._woken_for = None
        self.worker.settle(due)
        self._wake_later()
        pool = self.worker.pool
        if (pool.stored or pool.removed) and not self._news_due:
            self._news_due = True
            self._events.at(self._events.now + self._delays.directory, self._publish)

    def _publish(self) -> None:
        self._news_due = False
        if self.until is not None:
            return
        removed, stored = self.worker.pool.take_news()
        if removed:
            self._scheduler.index.removed(self.key, removed)
        if stored:
            self._scheduler.index.stored(self.key, stored)


class Blueprint(NamedTuple):
    """What every worker of a simulated fleet is like."""

    machine: Machine
    batch: BatchConfig
    block_size: int

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence: it has to fit the pool."""
        return self.machine.kv_tokens // self.block_size * self.block_size

    def card(self) -> ModelCard:
        return ModelCard(
            name=MODEL,
            folder="",
            max_model_len=self.max_len,
            vocab_size=1,
            block_size=self.block_size,
            hash_root=b"",
            kv_bytes_per_token=self.machine.kv_bytes,
        )

    def worker(self, listener: Listener) -> SimulatedWorker:
        return SimulatedWorker(self.machine, self.batch, self.block_size, listener)

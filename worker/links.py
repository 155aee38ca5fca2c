"""The worker's I/O thread: it drives every socket, and goes on while an engine step runs.

Frames from routers and the supervisor become events in the engine thread's inbox; what the engine thread
hands over is sent without ever blocking. A router that is gone or does not drain is reported as an event,
and costs nobody else anything. Knows nothing of requests or engines.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import msgspec
import zmq

from .config import WorkerConfig
from .kv_journal import KvJournal
from .protocol import (
    Attach,
    Drain,
    Heartbeat,
    ModelCard,
    Pulse,
    Ready,
    Register,
    Shutdown,
    WorkerStats,
)
from .router_links import FromRouter, RouterGone, RouterLinks
from .scheduler_link import SchedulerLink
from .transport import PEER_QUEUE, Codec, PeerUnreachable, ProtocolError, Security, advertised, connect, send

log = logging.getLogger(__name__)

FLUSH_KV_S = 0.02
FAREWELL_S = 1.0
COMPLAIN_EVERY_S = 10.0
# no peer of a ROUTER socket has an empty identity
SUPERVISOR = b""


@dataclass(frozen=True, slots=True)
class EpochSeen:
    epoch: int


@dataclass(frozen=True, slots=True)
class RankGone:
    reason: str


@dataclass(frozen=True, slots=True)
class PeerAsked:
    """Another worker wants KV blocks: the engine looks for such between its steps."""


Event = PeerAsked | FromRouter | RouterGone | EpochSeen | RankGone | Drain | Shutdown


class Links:
    """Sockets of one worker. `inbox` is read by the engine thread; the public methods are for it, too."""

    def __init__(
        self, config: WorkerConfig, incarnation: str, security: Security | None, journal: KvJournal
    ) -> None:
        self.inbox: SimpleQueue[Event] = SimpleQueue()
        self.malformed = 0
        self._config = config
        self._incarnation = incarnation
        self._security = security
        self._journal = journal
        self._context: zmq.Context[Any] = zmq.Context()
        pulse = Pulse(worker_id=config.worker_id, incarnation=incarnation)
        self._routers = RouterLinks(self._context, config.bind, security, pulse, self.inbox.put)
        self.endpoint = advertised(self._routers.endpoint, config.advertise_host)
        self._supervisor = (
            connect(self._context, config.supervisor, security, config.worker_id)
            if config.supervisor is not None
            else None
        )
        self._from_supervisor: Codec[Attach | Drain | Shutdown] = Codec(Attach | Drain | Shutdown)
        self._outbox: deque[tuple[bytes, msgspec.Struct | None, bool]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._scheduler: SchedulerLink | None = None
        self._attach: Attach | None = None
        self._stats: Callable[[], WorkerStats] | None = None
        self._closing = False
        self._complained = 0.0
        self._thread = threading.Thread(target=self._run, name="worker-links", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def to_router(self, owner: bytes, message: msgspec.Struct, *, must: bool = False) -> None:
        """`must`: keep it until the router drains, if it is there at all."""
        self._post(owner, message, must)

    def forgive(self, owner: bytes) -> None:
        """The engine thread has ended all streams of a router that RouterGone named; new ones may begin."""
        self._outbox.append((owner, None, False))

    def to_supervisor(self, message: msgspec.Struct) -> None:
        if self._supervisor is not None:
            self._post(SUPERVISOR, message, False)

    def announce(
        self,
        card: ModelCard,
        total_blocks: int,
        stats: Callable[[], WorkerStats],
        peer_endpoint: str = "",
    ) -> None:
        """The engine is warm: tell the supervisor, register and report from now on."""
        register = Register(
            worker_id=self._config.worker_id,
            incarnation=self._incarnation,
            endpoint=self.endpoint,
            card=card,
            stats=stats(),
            peer_endpoint=peer_endpoint,
        )
        self._scheduler = SchedulerLink(
            self._context, self._security, register, self._config.scheduler_timeout_s
        )
        self._stats = stats
        self.to_supervisor(
            Ready(
                worker_id=self._config.worker_id,
                incarnation=self._incarnation,
                endpoint=self.endpoint,
                card=card,
                total_blocks=total_blocks,
            )
        )

    def close(self) -> None:
        """Send what was handed over, wait a moment for it to leave, and end the thread."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _post(self, owner: bytes, message: msgspec.Struct, must: bool) -> None:
        self._outbox.append((owner, message, must))
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        next_beat = 0.0
        while True:
            self._wait(next_beat)
            now = time.monotonic()
            self._receive(self._routers.socket, self._routers.receive)
            self._receive(self._supervisor, self._on_supervisor)
            if self._scheduler is not None:
                self._receive(self._scheduler.socket, self._on_scheduler)
            self._follow(now)
            self._flush()
            if now >= next_beat:
                self._beat(now)
                next_beat = now + self._config.heartbeat_s
            self._flush_kv()
            if self._closing and not self._outbox:
                break
        self._hang_up()

    def _wait(self, next_beat: float) -> None:
        poller = zmq.Poller()
        scheduler = self._scheduler.socket if self._scheduler is not None else None
        for source in (self._routers.socket, self._supervisor, scheduler, self._wake):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        limit = max(0.0, next_beat - time.monotonic())
        if self._journal.pending:
            limit = min(limit, FLUSH_KV_S)
        ready = dict(poller.poll(math.ceil(1000 * limit)))
        if self._wake in ready:
            os.eventfd_read(self._wake)

    def _receive(self, socket: Any, handle: Callable[[list[bytes]], None]) -> None:
        """All frames that are there now; one that cannot be read is counted and dropped."""
        if socket is None:
            return
        for _ in range(PEER_QUEUE):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                handle(frames)
            except ProtocolError as error:
                self._complain(error)

    def _on_supervisor(self, frames: list[bytes]) -> None:
        message = self._from_supervisor.decode(frames[-1])
        if isinstance(message, Attach):
            self._attach = message
            self.inbox.put(EpochSeen(message.epoch))
        else:
            self.inbox.put(message)

    def _on_scheduler(self, frames: list[bytes]) -> None:
        assert self._scheduler is not None
        before = self._scheduler.epoch
        self._scheduler.receive(frames[-1], time.monotonic())
        if self._scheduler.epoch != before:
            self.inbox.put(EpochSeen(self._scheduler.epoch))

    def _follow(self, now: float) -> None:
        """Turn to the scheduler last named, once there is something to register."""
        if self._attach is not None and self._scheduler is not None and self._stats is not None:
            self._scheduler.attach(self._attach, now)
            self._attach = None
            self._scheduler.beat(self._stats(), now)

    def _beat(self, now: float) -> None:
        self._routers.beat(now)
        if self._scheduler is None or self._stats is None:
            return
        stats = self._stats()
        lost = self._scheduler.beat(stats, now)
        if lost is not None:
            self.to_supervisor(lost)
        self.to_supervisor(
            Heartbeat(worker_id=self._config.worker_id, incarnation=self._incarnation, stats=stats)
        )

    def _flush(self) -> None:
        while self._outbox:
            owner, message, must = self._outbox.popleft()
            if message is None:
                self._routers.forgive(owner)
            elif owner == SUPERVISOR:
                self._send_supervisor(message)
            else:
                self._routers.send(owner, message, must=must)

    def _send_supervisor(self, message: msgspec.Struct) -> bool:
        try:
            send(self._supervisor, self._from_supervisor.encode(message))
        except PeerUnreachable:
            return False
        return True

    def _flush_kv(self) -> None:
        if self._supervisor is None:
            return
        while (events := self._journal.take()) is not None:
            if not self._send_supervisor(events):
                self._journal.restore(events)
                return

    def _complain(self, error: ProtocolError) -> None:
        self.malformed += 1
        now = time.monotonic()
        if now - self._complained > COMPLAIN_EVERY_S:
            self._complained = now
            log.warning("malformed frame dropped (%d so far): %s", self.malformed, error)

    def _hang_up(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        self._routers.close(int(1000 * FAREWELL_S))
        if self._supervisor is not None:
            self._supervisor.close(linger=int(1000 * FAREWELL_S))
        self._context.term()

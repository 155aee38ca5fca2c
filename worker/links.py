"""The worker's I/O thread: it owns every socket, and goes on while an engine step runs.

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
from urllib.parse import urlsplit

import msgspec
import zmq

from .config import WorkerConfig
from .kv_journal import KvJournal
from .protocol import (
    Abort,
    Attach,
    Drain,
    Heartbeat,
    ModelCard,
    Ready,
    Register,
    Shutdown,
    StepOutput,
    Submit,
    TokenDelta,
    WorkerStats,
)
from .scheduler_link import SchedulerLink
from .transport import PEER_QUEUE, Codec, PeerUnreachable, ProtocolError, Security, bind, connect, send

log = logging.getLogger(__name__)

FLUSH_KV_S = 0.02
FAREWELL_S = 1.0
COMPLAIN_EVERY_S = 10.0
# no peer of a ROUTER socket has an empty identity
SUPERVISOR = b""
NOT_TAKEN = "the router did not take the tokens in time"


@dataclass(frozen=True, slots=True)
class FromRouter:
    owner: bytes
    message: Submit | Abort


@dataclass(frozen=True, slots=True)
class RouterGone:
    """Nothing can be sent to this router; `full` if it is there but does not drain."""

    owner: bytes
    full: bool


@dataclass(frozen=True, slots=True)
class EpochSeen:
    epoch: int


@dataclass(frozen=True, slots=True)
class RankGone:
    reason: str


Event = FromRouter | RouterGone | EpochSeen | RankGone | Drain | Shutdown


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
        self._routers, bound = bind(self._context, zmq.ROUTER, config.bind, security)
        self.endpoint = _advertised(bound, config.advertise_host)
        self._supervisor = (
            connect(self._context, config.supervisor, security, config.worker_id)
            if config.supervisor is not None
            else None
        )
        self._from_router: Codec[Submit | Abort] = Codec(Submit | Abort)
        self._from_supervisor: Codec[Attach | Drain | Shutdown] = Codec(Attach | Drain | Shutdown)
        self._outbox: deque[tuple[bytes, msgspec.Struct | None, bool]] = deque()
        # what a router must still be told once it drains: the ends of its streams
        self._owed: dict[bytes, deque[bytes]] = {}
        # a router that missed a frame gets no later one of the same streams: nothing until it is forgiven
        self._unreachable: set[bytes] = set()
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

    def announce(self, card: ModelCard, total_blocks: int, stats: Callable[[], WorkerStats]) -> None:
        """The engine is warm: tell the supervisor, register and report from now on."""
        register = Register(
            worker_id=self._config.worker_id,
            incarnation=self._incarnation,
            endpoint=self.endpoint,
            card=card,
            stats=stats(),
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
            self._receive(self._routers, self._on_router)
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
        for source in (self._routers, self._supervisor, scheduler, self._wake):
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

    def _on_router(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise ProtocolError(f"{len(frames)} frames instead of 2")
        owner, frame = frames
        message = self._from_router.decode(frame)
        self.inbox.put(FromRouter(owner, message))

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
        for owner in list(self._owed):
            self._pay(owner)
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
                self._unreachable.discard(owner)
            elif owner == SUPERVISOR:
                self._send_supervisor(message)
            elif must:
                self._owe(owner, message)
            else:
                self._send_router(owner, message)

    def _send_router(self, owner: bytes, message: msgspec.Struct) -> None:
        if owner not in self._unreachable:
            try:
                send(self._routers, owner, self._from_router.encode(message))
                return
            except PeerUnreachable as error:
                self._unreachable.add(owner)
                log.warning("router %s: %s; its sequences end", owner.decode(errors="replace"), error)
                self.inbox.put(RouterGone(owner, error.full))
        if isinstance(message, StepOutput):
            self._owe_ends(owner, message)

    def _owe_ends(self, owner: bytes, lost: StepOutput) -> None:
        """The engine knows sequences that ended in a lost message no more: their end is told from here."""
        ends = tuple(
            TokenDelta(
                request_id=delta.request_id,
                attempt=delta.attempt,
                index=delta.index,
                finish_reason="error",
                error=NOT_TAKEN,
            )
            for delta in lost.deltas
            if delta.finish_reason is not None
        )
        if ends:
            self._owe(owner, msgspec.structs.replace(lost, deltas=ends))

    def _owe(self, owner: bytes, message: msgspec.Struct) -> None:
        owed = self._owed.setdefault(owner, deque(maxlen=PEER_QUEUE))
        owed.append(self._from_router.encode(message))
        self._pay(owner)

    def _pay(self, owner: bytes) -> None:
        owed = self._owed[owner]
        try:
            while owed:
                send(self._routers, owner, owed[0])
                owed.popleft()
        except PeerUnreachable as error:
            if error.full:
                return
        del self._owed[owner]

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
        for socket in (self._routers, self._supervisor):
            if socket is not None:
                socket.close(linger=int(1000 * FAREWELL_S))
        self._context.term()


def _advertised(bound: str, host: str | None) -> str:
    """The bound endpoint as others reach it."""
    if host is None or not bound.startswith("tcp://"):
        return bound
    return f"tcp://{host}:{urlsplit(bound).port}"

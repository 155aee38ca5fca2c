"""The global scheduler on the wire: one ROUTER socket, one asyncio task, the pure core behind it.

Peers' ZeroMQ identities are their router or worker ids. Everything that is sent is sent from the one task,
never blocks, and is dropped with the peer where the peer does not drain. A frame that makes no sense is
counted and forgotten. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from decodefleet.worker.protocol import (
    Heartbeat,
    Hello,
    Place,
    Register,
    Release,
    RouterCounts,
    RouterReport,
    Started,
    Tier,
    ToScheduler,
)
from decodefleet.worker.transport import (
    Codec,
    PeerUnreachable,
    ProtocolError,
    Security,
    advertised,
    bind,
    send,
)

from ..directory.holdings import Holdings
from ..directory.listener import DirectoryListener
from ..tasks import end
from .config import SchedulingConfig
from .fleet_metrics import FleetMetrics, OwnCounters
from .history import History, Now
from .inventory import inventory
from .overview import overview
from .scheduler import GlobalScheduler, Outgoing
from .view import WorkerKey

log = logging.getLogger(__name__)

TICK_S = 0.05
# a loop that was held up this long must hear its peers before it calls anybody silent
_HELD_UP_S = 1.0
_BATCH = 256
_COMPLAIN_EVERY_S = 10.0


class Directory(Protocol):
    """Source of what workers hold: `cluster.directory.DirectoryReader`."""

    @property
    def connected(self) -> bool: ...

    @property
    def lag_s(self) -> float: ...

    @property
    def gaps(self) -> int: ...

    async def start(self, listener: DirectoryListener) -> None: ...

    async def stop(self) -> None: ...


class SchedulerServer:
    """bind: where to listen, port 0 for a free one. advertise_host: told to others instead of the bound one.

    epoch: must grow with every scheduler of a cluster, over restarts and machines; the default is the time
    in milliseconds, which does so as long as clocks are right to the time that a restart takes.
    Raises ValueError from `start` where an unsecured socket would listen beyond loopback.
    """

    def __init__(
        self,
        *,
        bind: str = "tcp://127.0.0.1:0",
        advertise_host: str | None = None,
        security: Security | None = None,
        config: SchedulingConfig | None = None,
        directory: Directory | None = None,
        epoch: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.core = GlobalScheduler(epoch or int(time.time() * 1000), config, seed=seed)
        self.malformed = 0
        self.unreachable: Counter[str] = Counter()
        self._bind, self._advertise_host, self._security = bind, advertise_host, security
        self._directory = directory
        self._metrics = FleetMetrics()
        self._history = History()
        self._counts: dict[str, RouterCounts] = {}
        self._codec: Codec[ToScheduler] = Codec(ToScheduler)
        self._context: zmq.Context[Any] | None = None
        self._socket: Any = None
        self._task: asyncio.Task[None] | None = None
        self._endpoint = ""
        self._last_tick = 0.0
        self._last_complaint = float("-inf")

    @property
    def epoch(self) -> int:
        return self.core.epoch

    @property
    def endpoint(self) -> str:
        """Where peers connect; empty before `start`."""
        return self._endpoint

    async def start(self) -> str:
        """Listen; returns the endpoint for peers to connect to."""
        self._context = zmq.Context()
        try:
            self._socket, endpoint = bind(self._context, zmq.ROUTER, self._bind, self._security)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._endpoint = advertised(endpoint, self._advertise_host)
        if self._directory is not None:
            await self._directory.start(IndexFeed(self.core))
        self._last_tick = time.monotonic()
        self._task = asyncio.create_task(self._run(), name="scheduler")
        return self._endpoint

    async def stop(self) -> None:
        """Idempotent."""
        if self._task is not None:
            await end(self._task)
            self._task = None
        if self._directory is not None:
            await self._directory.stop()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def check_health(self) -> None:
        """Raises RuntimeError when the server does not run, or no longer."""
        if self._task is None:
            raise RuntimeError("the scheduler was not started")
        if self._task.done():
            raise RuntimeError("the scheduler has ended") from self._task.exception()

    async def metrics(self) -> str:
        """The fleet's metrics in Prometheus text form, put together off the event loop."""
        sample = self._metrics.sample(self.core, self._own_counters())
        return await asyncio.to_thread(sample.render)

    def placements(self, request_id: str | None = None, count: int = 100) -> list[dict[str, Any]]:
        """Decisions on one request, or the latest ones, as plain data; `at` is Unix time."""
        decisions = self.core.log.recent(count) if request_id is None else self.core.log.explain(request_id)
        offset = time.time() - time.monotonic()
        return [decision | {"at": decision["at"] + offset} for decision in decisions]

    def overview(self, since: float = 0.0) -> dict[str, Any]:
        """The fleet at a glance, and its past after this Unix time."""
        return overview(self.core, self._history, time.monotonic(), time.time(), since)

    def directory(self, model: str | None = None, prompt: bytes | None = None) -> Holdings:
        """Who holds what; see `inventory`."""
        holdings = inventory(self.core, model, prompt, time.monotonic())
        reader = self._directory
        if reader is None:
            return holdings
        return msgspec.structs.replace(holdings, lag_s=reader.lag_s, gaps=reader.gaps)

    async def _run(self) -> None:
        readable = zmq.asyncio.Socket.from_socket(self._socket)
        try:
            while True:
                await readable.poll(int(TICK_S * 1000))
                self._receive()
                self._tick(time.monotonic())
                # a flood of frames must not starve what else the loop does
                await asyncio.sleep(0)
        finally:
            readable.close()

    def _receive(self) -> None:
        """Handle what has arrived, up to a batch."""
        for _ in range(_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(frames)

    def _handle(self, frames: list[bytes]) -> None:
        try:
            identity, frame = frames
            peer = identity.decode()
            message = self._codec.decode(frame)
            self._send(self._dispatch(peer, message, time.monotonic()))
        except (ProtocolError, ValueError) as error:
            self._complain(frames[0], error)
        except Exception:
            # one peer's message must never end the scheduler for all
            log.exception("a message of %r failed", frames[0])
            self.malformed += 1

    def _dispatch(self, peer: str, message: ToScheduler, now: float) -> list[Outgoing]:
        """Raises ProtocolError for a peer that speaks in another's name."""
        core = self.core
        match message:
            case Place():
                return core.place(message, peer, now)
            case Started():
                return core.started(message, peer, now)
            case Release():
                return core.release(message, peer, now)
            case Heartbeat():
                _same(peer, message.worker_id)
                outgoing = core.heartbeat(message, now)
                self._note(message)
                return outgoing
            case RouterReport():
                _same(peer, message.router_id)
                self._metrics.router_report(message.router_id, message.metrics)
                if message.counts is not None:
                    self._counts[message.router_id] = message.counts
                return core.router_report(message, now)
            case Hello():
                _same(peer, message.router_id)
                return core.hello(message.router_id, now)
            case Register():
                _same(peer, message.worker_id)
                self._check_card(message)
                outgoing = core.register(message, now)
                self._note(message)
                return outgoing

    def _note(self, message: Heartbeat | Register) -> None:
        """Keep for /metrics and the recent past what a member reports; others' words don't count."""
        key = WorkerKey(message.worker_id, message.incarnation)
        member = self.core.fleet.find(key)
        if member is not None:
            self._metrics.worker_report(key, member.card.name, message.stats)
            if message.stats.draining:
                self._history.drains(key)

    def _tick(self, now: float) -> None:
        since = now - self._last_tick
        if since < TICK_S:
            return
        self._last_tick = now
        if since > _HELD_UP_S:
            return
        if self._directory is not None:
            self.core.directory_up = self._directory.connected
        self._send(self.core.tick(now))
        if self._history.due(now):
            self._note_history(now)

    def _note_history(self, now: float) -> None:
        routers = frozenset(self.core.routers)
        self._counts = {router: counts for router, counts in self._counts.items() if router in routers}
        workers = {member.key: member.stats for member in self.core.fleet}
        self._history.note(now, time.time(), Now(workers, dict(self._counts), len(self.core.queue)))

    def _send(self, outgoing: Iterable[Outgoing]) -> None:
        for peer, message in outgoing:
            try:
                send(self._socket, peer.encode(), self._codec.encode(message))
            except PeerUnreachable as error:
                self.unreachable["full" if error.full else "gone"] += 1
                # a worker that cannot be reached is found by its silence; a router's place goes at once
                if peer in self.core.routers:
                    self._send(self.core.router_gone(peer, time.monotonic()))

    def _check_card(self, message: Register) -> None:
        """Unequal workers under one name serve, but share no prefixes: that must not go unnoticed."""
        known = self.core.fleet.card(message.card.name)
        if known is None:
            return
        unequal = [
            name
            for name in ("hash_root", "block_size", "vocab_size", "max_model_len", "eos_token_ids")
            if getattr(known, name) != getattr(message.card, name)
        ]
        if unequal:
            log.error(
                "worker %s serves %s with another %s than the others",
                message.worker_id,
                message.card.name,
                ", ".join(unequal),
            )

    def _complain(self, identity: bytes, error: Exception) -> None:
        self.malformed += 1
        now = time.monotonic()
        if now - self._last_complaint >= _COMPLAIN_EVERY_S:
            self._last_complaint = now
            log.warning("malformed frame from %r (%d so far): %s", identity, self.malformed, error)

    def _own_counters(self) -> OwnCounters:
        directory = self._directory
        return OwnCounters(
            malformed=self.malformed,
            unreachable=dict(self.unreachable),
            directory_up=directory is not None and directory.connected,
            directory_lag_s=directory.lag_s if directory is not None else None,
        )


class IndexFeed:
    """Writes what the directory tells into the core's prefix index."""

    def __init__(self, core: GlobalScheduler) -> None:
        self._core = core

    def on_stored(self, worker_id: str, incarnation: str, hashes: list[bytes], tier: Tier) -> None:
        self._core.index.stored(WorkerKey(worker_id, incarnation), hashes, tier)

    def on_removed(self, worker_id: str, incarnation: str, hashes: list[bytes], tier: Tier) -> None:
        self._core.index.removed(WorkerKey(worker_id, incarnation), hashes, tier)

    def on_cleared(self, worker_id: str, incarnation: str) -> None:
        self._core.index.clear(WorkerKey(worker_id, incarnation))


def _same(peer: str, claimed: str) -> None:
    if peer != claimed:
        raise ProtocolError(f"{peer!r} speaks for {claimed!r}")

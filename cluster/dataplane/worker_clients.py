"""Connections to workers, one per endpoint, made when first needed and closed when idle.

Sorts incoming tokens into the streams that wait for them. A worker that is lost, by whatever sign, ends its
own streams with a typed error and nobody else's: its connection was reset, it fell silent, or the scheduler
has fenced it. Its sequences are told to stop, should it still be there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from itertools import count

import zmq.asyncio

from decodefleet.worker.protocol import (
    Abort,
    Fenced,
    Placement,
    Pulse,
    Rejected,
    StepOutput,
    Submit,
    ToRouter,
)
from decodefleet.worker.transport import Codec, PeerUnreachable, Security

from .connection import Connection
from .errors import RouterStopping, WorkerLost, WorkerRejected
from .last_snapshot import Life
from .streams import TokenStream

log = logging.getLogger(__name__)

IDLE_S = 60.0
FAREWELL_MS = 500
SWEEP_S = 0.5
# a worker sends something every second at least
SILENCE_S = 3.0
# a worker that we have heard so lately is only cut off from the scheduler: its streams stay
LATELY_S = 1.5
# of one stream, while its worker lives: a safety net, since neither has a reason to be quiet for so long
STREAM_SILENCE_S = 120.0
# a loop that was held up this long must hear its peers before it calls anybody silent
HELD_UP_S = 1.0

Key = tuple[str, int]


class _Worker:
    """One worker as one incarnation of it at one endpoint. heard: when, on the loop's clock."""

    def __init__(self, owner: WorkerClients, placement: Placement, identity: str, now: float) -> None:
        self.worker_id = placement.worker_id
        self.incarnation = placement.incarnation
        self.endpoint = placement.endpoint
        self.heard = now
        # workers of older versions send none, and may be silent for as long as a prefill takes
        self.pulses = False
        self._news = False
        self.streams: dict[Key, TokenStream] = {}
        self.idle: asyncio.TimerHandle | None = None
        self._owner = owner
        self.connection: Connection[ToRouter] = Connection(
            owner.context,
            placement.endpoint,
            owner.security,
            identity,
            owner.codec,
            self._on_message,
            self.lose,
        )

    def lose(self, reason: str) -> None:
        """All its streams end here, and there too if it hears of it."""
        self._owner.forget(self)
        self._owner.on_lost((self.worker_id, self.incarnation))
        for request_id, attempt in self.streams:
            with contextlib.suppress(PeerUnreachable):
                self.connection.send(Abort(request_id=request_id, attempt=attempt))
        self.connection.close(FAREWELL_MS)
        lost = WorkerLost(f"worker {self.worker_id}: {reason}", reached=self.connection.established)
        for stream in list(self.streams.values()):
            stream.fail(lost)

    def heard_lately(self, now: float) -> bool:
        return self.pulses and (self._news or now - self.heard < LATELY_S)

    def sweep(self, now: float, *, held_up: bool) -> None:
        """Look who has been silent for too long."""
        if self._news or held_up or not self.streams:
            self.heard, self._news = now, False
        if self.pulses and now - self.heard > SILENCE_S:
            self.lose("silent")
            return
        for stream in list(self.streams.values()):
            if stream.silent_for is not None:
                stream.silent_for += 1
                if stream.silent_for * SWEEP_S > STREAM_SILENCE_S:
                    stream.abandon(WorkerLost(f"worker {self.worker_id} sent no more of the stream"))

    def _on_message(self, message: ToRouter) -> None:
        self._news = True
        if isinstance(message, StepOutput):
            for delta in message.deltas:
                stream = self.streams.get((delta.request_id, delta.attempt))
                if stream is not None:
                    stream.put(delta)
        elif isinstance(message, Rejected):
            stream = self.streams.get((message.request_id, message.attempt))
            if stream is not None:
                stream.fail(WorkerRejected(message))
        elif isinstance(message, Pulse):
            self.pulses = True


class WorkerClients:
    """All workers that one router talks to."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        router_id: str,
        security: Security | None,
        on_lost: Callable[[Life], None] = lambda _life: None,
    ) -> None:
        self.context = context
        self.router_id = router_id
        self.security = security
        self.on_lost = on_lost
        self.codec: Codec[ToRouter] = Codec(ToRouter)
        self._workers: dict[str, _Worker] = {}
        # each connection has a name of its own: what a worker holds for one is never sent to the next
        self._numbers = count(1)
        self._swept = 0.0
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def connected(self) -> int:
        """Workers to which there is a connection now."""
        return len(self._workers)

    def submit(self, placement: Placement, submit: Submit) -> TokenStream:
        """Start a request at the worker that was chosen. Raises WorkerLost where nothing can be sent."""
        worker = self._worker(placement)
        key = (submit.request_id, submit.attempt)

        def send_abort(index: int | None) -> None:
            self._abort(worker, Abort(request_id=key[0], attempt=key[1], index=index))

        stream = TokenStream(submit.live, send_abort, lambda: self._end(worker, key))
        worker.streams[key] = stream
        try:
            worker.connection.send(submit)
        except PeerUnreachable as error:
            self._end(worker, key)
            raise WorkerLost(f"worker {worker.worker_id}: {error}", reached=False) from None
        return stream

    def fence(self, fenced: Iterable[Fenced]) -> None:
        """What the scheduler has given up: streams there end now, unless it is silent and we hear it."""
        reasons = {(each.worker_id, each.incarnation): each.reason for each in fenced}
        now = asyncio.get_running_loop().time()
        for worker in list(self._workers.values()):
            reason = reasons.get((worker.worker_id, worker.incarnation))
            if reason is not None and not (reason == "silent" and worker.heard_lately(now)):
                worker.lose(f"fenced as {reason}")

    def forget(self, worker: _Worker) -> None:
        if self._workers.get(worker.endpoint) is worker:
            del self._workers[worker.endpoint]

    def close(self) -> None:
        """Ends all streams; aborts that were just sent still leave."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for worker in list(self._workers.values()):
            self.forget(worker)
            worker.connection.close(FAREWELL_MS)
            for stream in list(worker.streams.values()):
                stream.fail(RouterStopping("the router is stopping"))

    def _worker(self, placement: Placement) -> _Worker:
        """The connection to that life of that worker."""
        loop = asyncio.get_running_loop()
        worker = self._workers.get(placement.endpoint)
        if worker is not None and worker.incarnation != placement.incarnation:
            worker.lose("has restarted")
            worker = None
        if worker is None:
            identity = f"{self.router_id}.{next(self._numbers)}"
            worker = _Worker(self, placement, identity, loop.time())
            self._workers[placement.endpoint] = worker
        if worker.idle is not None:
            worker.idle.cancel()
            worker.idle = None
        if self._sweeper is None:
            self._swept = loop.time()
            self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        return worker

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now, since = loop.time(), self._swept
        self._swept = now
        for worker in list(self._workers.values()):
            worker.sweep(now, held_up=now - since > SWEEP_S + HELD_UP_S)
        self._sweeper = loop.call_later(SWEEP_S, self._sweep) if self._workers else None

    def _abort(self, worker: _Worker, abort: Abort) -> None:
        try:
            worker.connection.send(abort)
        except PeerUnreachable as error:
            # a worker that takes no aborts is as good as gone; it ends our streams when it notices
            worker.lose(str(error))

    def _end(self, worker: _Worker, key: Key) -> None:
        worker.streams.pop(key, None)
        if not worker.streams and self._workers.get(worker.endpoint) is worker:
            worker.idle = asyncio.get_running_loop().call_later(IDLE_S, self._close_idle, worker)

    def _close_idle(self, worker: _Worker) -> None:
        if not worker.streams:
            self.forget(worker)
            worker.connection.close()

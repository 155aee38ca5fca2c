"""Connections to workers, one per endpoint, made when first needed and closed when idle.

Sorts incoming tokens into the streams that wait for them. A connection that is lost ends its own streams
with a typed error and nobody else's.
"""

from __future__ import annotations

import asyncio
import logging

import zmq.asyncio

from decodefleet.worker.protocol import Abort, Placement, Rejected, StepOutput, Submit, ToRouter
from decodefleet.worker.transport import Codec, PeerUnreachable, Security

from .connection import Connection
from .errors import RouterStopping, WorkerLost, WorkerRejected
from .streams import TokenStream

log = logging.getLogger(__name__)

IDLE_S = 60.0
FAREWELL_MS = 500

Key = tuple[str, int]


class _Worker:
    """One worker as one incarnation of it at one endpoint."""

    def __init__(self, owner: WorkerClients, placement: Placement) -> None:
        self.worker_id = placement.worker_id
        self.endpoint = placement.endpoint
        self.streams: dict[Key, TokenStream] = {}
        self.idle: asyncio.TimerHandle | None = None
        self._owner = owner
        self.connection: Connection[ToRouter] = Connection(
            owner.context,
            placement.endpoint,
            owner.security,
            owner.router_id,
            owner.codec,
            self._on_message,
            self.lose,
        )

    def lose(self, reason: str) -> None:
        self._owner.forget(self)
        self.connection.close()
        for stream in list(self.streams.values()):
            stream.fail(WorkerLost(f"worker {self.worker_id}: {reason}"))

    def _on_message(self, message: ToRouter) -> None:
        if isinstance(message, StepOutput):
            for delta in message.deltas:
                stream = self.streams.get((delta.request_id, delta.attempt))
                if stream is not None:
                    stream.put(delta)
        elif isinstance(message, Rejected):
            stream = self.streams.get((message.request_id, message.attempt))
            if stream is not None:
                stream.fail(WorkerRejected(message))


class WorkerClients:
    """All workers that one router talks to."""

    def __init__(self, context: zmq.asyncio.Context, router_id: str, security: Security | None) -> None:
        self.context = context
        self.router_id = router_id
        self.security = security
        self.codec: Codec[ToRouter] = Codec(ToRouter)
        self._workers: dict[str, _Worker] = {}

    @property
    def connected(self) -> int:
        """Workers to which there is a connection now."""
        return len(self._workers)

    def submit(self, placement: Placement, submit: Submit) -> TokenStream:
        """Start a request at the worker that was chosen. Raises WorkerLost where nothing can be sent."""
        worker = self._workers.get(placement.endpoint)
        if worker is None:
            worker = self._workers[placement.endpoint] = _Worker(self, placement)
        if worker.idle is not None:
            worker.idle.cancel()
            worker.idle = None
        key = (submit.request_id, submit.attempt)

        def send_abort(index: int | None) -> None:
            self._abort(worker, Abort(request_id=key[0], attempt=key[1], index=index))

        stream = TokenStream(submit.live, send_abort, lambda: self._end(worker, key))
        worker.streams[key] = stream
        try:
            worker.connection.send(submit)
        except PeerUnreachable as error:
            self._end(worker, key)
            raise WorkerLost(f"worker {worker.worker_id}: {error}") from None
        return stream

    def forget(self, worker: _Worker) -> None:
        if self._workers.get(worker.endpoint) is worker:
            del self._workers[worker.endpoint]

    def close(self) -> None:
        """Ends all streams; aborts that were just sent still leave."""
        for worker in list(self._workers.values()):
            self.forget(worker)
            worker.connection.close(FAREWELL_MS)
            for stream in list(worker.streams.values()):
                stream.fail(RouterStopping("the router is stopping"))

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

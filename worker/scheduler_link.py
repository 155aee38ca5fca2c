"""The worker's line to the global scheduler: registration, heartbeats, and noticing that it is gone.

Driven by the I/O thread. A scheduler is known by its endpoint and epoch; an older epoch is never obeyed.
Knows nothing of requests.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from .protocol import Acknowledge, Attach, FromScheduler, Heartbeat, Register, SchedulerLost, WorkerStats
from .transport import Codec, PeerUnreachable, Security, connect, send


class SchedulerLink:
    """Registers until it is acknowledged, then reports. Times are monotonic seconds."""

    def __init__(
        self, context: zmq.Context[Any], security: Security | None, register: Register, timeout_s: float
    ) -> None:
        self._context = context
        self._security = security
        self._register = register
        self._timeout_s = timeout_s
        self._codec: Codec[FromScheduler] = Codec(FromScheduler)
        self._endpoint: str | None = None
        self._registered = False
        self._heard = 0.0
        self.epoch = 0
        self.socket: Any = None

    def attach(self, attach: Attach, now: float) -> None:
        """Turn to this scheduler, unless it is older than the one we follow."""
        if attach.epoch < self.epoch:
            return
        self.epoch = attach.epoch
        self._endpoint = attach.endpoint
        self._connect(now)

    def beat(self, stats: WorkerStats, now: float) -> SchedulerLost | None:
        """Report; answers SchedulerLost once per timeout of silence, after turning to a fresh connection."""
        if self._endpoint is None:
            return None
        lost = None
        if now - self._heard > self._timeout_s:
            lost = SchedulerLost(epoch=self.epoch)
            # a fresh socket: what piled up for a dead scheduler must not reach its successor
            self._connect(now)
        self._report(stats)
        return lost

    def receive(self, frame: bytes, now: float) -> None:
        """Raises ProtocolError."""
        message = self._codec.decode(frame)
        if not isinstance(message, Acknowledge) or message.epoch < self.epoch:
            return
        self.epoch = message.epoch
        self._heard = now
        self._registered = message.known

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close(linger=0)
            self.socket = None

    def _connect(self, now: float) -> None:
        assert self._endpoint is not None
        self.close()
        self._heard = now
        self._registered = False
        self.socket = connect(self._context, self._endpoint, self._security, self._register.worker_id)

    def _report(self, stats: WorkerStats) -> None:
        message: Register | Heartbeat = msgspec.structs.replace(self._register, stats=stats)
        if self._registered:
            message = Heartbeat(
                worker_id=self._register.worker_id, incarnation=self._register.incarnation, stats=stats
            )
        try:
            send(self.socket, self._codec.encode(message))
        except PeerUnreachable:
            # silence is what tells that it is lost, not one full queue
            return

"""The worker's socket towards routers: frames in, tokens out, and noticing that a router is gone.

Driven by the I/O thread; nothing here ever blocks. A router that is gone or does not drain is an event for
the engine thread, and costs nobody else anything. Each connection of a router has an identity of its own, so
that what belongs to one that was cut off can never reach the next. Knows nothing of engines.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from .protocol import Abort, Pulse, StepOutput, Submit, TokenDelta
from .transport import PEER_QUEUE, Codec, PeerUnreachable, ProtocolError, Security, bind, send

log = logging.getLogger(__name__)

PULSE_S = 1.0
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


class RouterLinks:
    """`tell` gets the events. Times are monotonic seconds."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        security: Security | None,
        pulse: Pulse,
        tell: Callable[[FromRouter | RouterGone], None],
    ) -> None:
        self.socket, self.endpoint = bind(context, zmq.ROUTER, endpoint, security)
        self._codec: Codec[Submit | Abort] = Codec(Submit | Abort)
        self._pulse = self._codec.encode(pulse)
        self._next_pulse = 0.0
        self._tell = tell
        self._heard: set[bytes] = set()
        # what a router must still be told once it drains: the ends of its streams
        self._owed: dict[bytes, deque[bytes]] = {}
        # a router that missed a frame gets no later one of the same streams: nothing until it is forgiven
        self._unreachable: set[bytes] = set()

    def receive(self, frames: list[bytes]) -> None:
        """Raises ProtocolError."""
        if len(frames) != 2:
            raise ProtocolError(f"{len(frames)} frames instead of 2")
        owner, frame = frames
        message = self._codec.decode(frame)
        self._heard.add(owner)
        self._tell(FromRouter(owner, message))

    def send(self, owner: bytes, message: msgspec.Struct, *, must: bool) -> None:
        """`must`: keep it until the router drains, if it is there at all."""
        if must:
            self._owe(owner, message)
            return
        lost = owner in self._unreachable or not self._reach(owner, self._codec.encode(message))
        if lost and isinstance(message, StepOutput):
            self._owe_ends(owner, message)

    def forgive(self, owner: bytes) -> None:
        """All streams of a router that RouterGone named have ended; new ones may begin."""
        self._unreachable.discard(owner)

    def beat(self, now: float) -> None:
        """Pay what is owed; now and then, find out who is still there, and let them know that we are."""
        for owner in list(self._owed):
            self._pay(owner)
        if now < self._next_pulse:
            return
        self._next_pulse = now + PULSE_S
        for owner in self._heard - self._unreachable:
            try:
                send(self.socket, owner, self._pulse)
            except PeerUnreachable as error:
                # one that does not drain is found by the first tokens that it does not take
                if not error.full:
                    self._lose(owner, error)

    def close(self, linger_ms: int) -> None:
        self.socket.close(linger=linger_ms)

    def _reach(self, owner: bytes, frame: bytes) -> bool:
        try:
            send(self.socket, owner, frame)
        except PeerUnreachable as error:
            self._lose(owner, error)
            return False
        return True

    def _lose(self, owner: bytes, error: PeerUnreachable) -> None:
        self._unreachable.add(owner)
        if not error.full:
            self._heard.discard(owner)
        log.info("router %s: %s; its sequences end", owner.decode(errors="replace"), error)
        self._tell(RouterGone(owner, error.full))

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
        owed.append(self._codec.encode(message))
        self._pay(owner)

    def _pay(self, owner: bytes) -> None:
        owed = self._owed[owner]
        try:
            while owed:
                send(self.socket, owner, owed[0])
                owed.popleft()
        except PeerUnreachable as error:
            if error.full:
                return
        del self._owed[owner]

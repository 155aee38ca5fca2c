"""One DEALER towards one peer, on the event loop: sends never block, and its loss is an event.

Knows frames and the life of a connection, not what messages mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from decodefleet.worker.transport import Codec, PeerUnreachable, ProtocolError, Security, dealer

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0

T = TypeVar("T")

_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Connection(Generic[T]):
    """Calls `on_message` for each frame that can be read and `on_lost` once, when the peer goes away.

    established: whether there ever was a connection.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        security: Security | None,
        identity: str,
        codec: Codec[T],
        on_message: Callable[[T], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.malformed = 0
        self.established = False
        self._codec = codec
        self._on_message = on_message
        self._on_lost = on_lost
        self._closed = False
        self._socket: Any = dealer(context, security, identity)
        # before connecting, or the events of connecting are missed
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _LOST)
        self._socket.connect(endpoint)
        self._tasks = (asyncio.create_task(self._receive()), asyncio.create_task(self._watch()))

    def send(self, message: msgspec.Struct) -> None:
        """Raises PeerUnreachable when the queue towards the peer is full or closed."""
        if self._closed:
            raise PeerUnreachable(full=False)
        sent = self._socket.send(self._codec.encode(message), zmq.NOBLOCK)
        if sent.done() and sent.exception() is not None:
            raise PeerUnreachable(full=True)

    def close(self, linger_ms: int = 0) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    async def _receive(self) -> None:
        try:
            await self._receive_all()
        except Exception:
            log.exception("receiving failed")
            self._on_lost("receiving failed")

    async def _receive_all(self) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                message = self._codec.decode(frame)
            except ProtocolError as error:
                self.malformed += 1
                if self.malformed & (self.malformed - 1) == 0:
                    log.warning("malformed frame dropped (%d so far): %s", self.malformed, error)
                continue
            self._on_message(message)
            # what is there already is received without waiting: let those run who consume it
            await asyncio.sleep(0)

    async def _watch(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S) as limit:
                while True:
                    event = (await recv_monitor_message(self._monitor))["event"]
                    if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        break
                    self.established = True
                    limit.reschedule(None)
        except TimeoutError:
            self._on_lost("cannot be reached")
            return
        self._on_lost("connection lost")

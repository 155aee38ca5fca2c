"""One DEALER towards one peer, on the event loop: sends never block, and its loss is an event.

Knows frames and the life of a connection, not what messages mean. The socket is a plain one, read when its
descriptor says so: futures of pyzmq's asyncio sockets would cost more than the messages.
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
        self._socket: Any = dealer(zmq.Context.shadow(context), security, identity)
        self._descriptor: int = self._socket.fd
        # before connecting, or the events of connecting are missed
        events = f"inproc://events-{self._descriptor}"
        self._socket.monitor(events, zmq.EVENT_HANDSHAKE_SUCCEEDED | _LOST)
        self._monitor: Any = context.socket(zmq.PAIR)
        self._monitor.connect(events)
        self._loop = asyncio.get_running_loop()
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            # whoever told us this endpoint may tell a better one next time
            self._loop.call_soon(self._fail, f"{endpoint} cannot be connected to: {error}")
        self._reading: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._read_soon)
        self._watching = asyncio.create_task(self._watch())

    def send(self, message: msgspec.Struct) -> None:
        """Raises PeerUnreachable when the queue towards the peer is full or closed."""
        if self._closed:
            raise PeerUnreachable(full=False)
        try:
            self._socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            raise PeerUnreachable(full=True) from None
        # sending may take the descriptor's sign for what has come meanwhile
        self._read_soon()

    def close(self, linger_ms: int = 0) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        if self._reading is not None:
            self._reading.cancel()
        self._watching.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _fail(self, reason: str) -> None:
        if not self._closed:
            self._on_lost(reason)

    def _read_soon(self) -> None:
        if self._reading is None and not self._closed:
            self._reading = self._loop.call_soon(self._read)

    def _read(self) -> None:
        """One message; those who consume it run before the next."""
        self._reading = None
        try:
            self._take(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return
        except Exception:
            log.exception("receiving failed")
            self._on_lost("receiving failed")
        self._read_soon()

    def _take(self, frame: bytes) -> None:
        try:
            message = self._codec.decode(frame)
        except ProtocolError as error:
            self.malformed += 1
            if self.malformed & (self.malformed - 1) == 0:
                log.warning("malformed frame dropped (%d so far): %s", self.malformed, error)
            return
        self._on_message(message)

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

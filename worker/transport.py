"""How messages travel: msgpack frames over ZeroMQ, with CURVE keys from a cluster secret. Torch-free.

A frame is one version byte and one msgpack message. ROUTER sockets are mandatory-routing with a bounded
queue per peer: a peer that does not drain gets `PeerUnreachable`, and its streams are ended with a reason;
nobody else's memory is spent on it. Knows nothing of what messages mean.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.utils.z85

from .protocol import PROTOCOL_VERSION

PEER_QUEUE = 4096
MAX_FRAME_BYTES = 64 << 20
# a peer that is frozen or cut off counts as gone after the timeout, though no connection was reset. To either
# side: whoever was frozen itself for so long finds its connections ended, and what was on its way lost
HEARTBEAT_MS = 500
HEARTBEAT_TIMEOUT_MS = 2000

T = TypeVar("T")


class ProtocolError(ValueError):
    """A frame that cannot be understood: wrong version, not msgpack, or not a message of this direction."""


class PeerUnreachable(ConnectionError):
    """The peer is gone, or (`full`) its queue is, because it does not drain."""

    def __init__(self, *, full: bool) -> None:
        super().__init__("the peer does not drain its queue" if full else "the peer is gone")
        self.full = full


class Codec(Generic[T]):
    """Encodes any message; decodes the union it was built for."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(union)

    def encode(self, message: msgspec.Struct) -> bytes:
        return bytes((PROTOCOL_VERSION,)) + self._encoder.encode(message)

    def decode(self, frame: bytes) -> T:
        if not frame or frame[0] != PROTOCOL_VERSION:
            raise ProtocolError(
                f"frame of protocol version {frame[:1].hex() or 'none'}, not {PROTOCOL_VERSION}"
            )
        try:
            message: T = self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.DecodeError, ValueError) as error:
            raise ProtocolError(str(error)) from error
        return message


class Security(msgspec.Struct, frozen=True):
    """CURVE key pair that all members of a cluster derive from its secret; None means loopback only."""

    public: bytes
    private: bytes

    @classmethod
    def from_secret(cls, secret: str | None) -> Security | None:
        if not secret:
            return None
        private = zmq.utils.z85.encode(
            blake2b(secret.encode(), digest_size=32, person=b"decodefleet").digest()
        )
        return cls(public=zmq.curve_public(private), private=private)


def bind(
    context: zmq.Context[Any],
    kind: int,
    endpoint: str,
    security: Security | None,
    silence_ms: int = HEARTBEAT_TIMEOUT_MS,
) -> tuple[Any, str]:
    """A listening socket and the endpoint it really got (port 0 asks for a free one).

    silence_ms: after which a peer counts as gone.

    Raises ValueError where an unsecured socket would listen beyond loopback.
    """
    if security is None and not is_local(endpoint):
        raise ValueError(f"{endpoint}: without a cluster secret sockets bind to loopback only; set one")
    socket = _make(context, kind, silence_ms)
    if security is not None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = security.public, security.private
    if kind == zmq.ROUTER:
        socket.router_mandatory = True
        socket.router_handover = True
    wildcard = endpoint.startswith("tcp://") and endpoint.endswith(":0")
    socket.bind(endpoint[:-1] + "*" if wildcard else endpoint)
    return socket, socket.last_endpoint.decode().rstrip("\0")


def connect(
    context: zmq.Context[Any],
    endpoint: str,
    security: Security | None,
    identity: str | None = None,
    silence_ms: int = HEARTBEAT_TIMEOUT_MS,
) -> Any:
    """A DEALER towards one peer; `identity` is how the peer's ROUTER names us; silence_ms: as in `bind`.

    Raises zmq.ZMQError where the endpoint is none.
    """
    socket = dealer(context, security, identity, silence_ms)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError:
        # a context waits for its sockets
        socket.close()
        raise
    return socket


def dealer(
    context: zmq.Context[Any],
    security: Security | None,
    identity: str | None = None,
    silence_ms: int = HEARTBEAT_TIMEOUT_MS,
) -> Any:
    """The same, not connected yet: for those who want to watch the connection being made."""
    socket = _make(context, zmq.DEALER, silence_ms)
    if identity is not None:
        socket.identity = identity.encode()
    if security is not None:
        socket.curve_serverkey = security.public
        socket.curve_publickey, socket.curve_secretkey = security.public, security.private
    return socket


def send(socket: Any, *frames: bytes) -> None:
    """Send without ever blocking. Raises PeerUnreachable; nothing was sent then."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        raise PeerUnreachable(full=True) from None
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        raise PeerUnreachable(full=False) from None


def is_local(endpoint: str) -> bool:
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    host = urlsplit(endpoint).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def advertised(bound: str, host: str | None) -> str:
    """A bound endpoint as others reach it."""
    if host is None or not bound.startswith("tcp://"):
        return bound
    return f"tcp://{host}:{urlsplit(bound).port}"


def _make(context: zmq.Context[Any], kind: int, silence_ms: int) -> Any:
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = PEER_QUEUE
    socket.rcvhwm = PEER_QUEUE
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = silence_ms
    socket.heartbeat_ttl = silence_ms
    return socket

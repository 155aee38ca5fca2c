"""The thread that carries KV blocks between workers: it owns their sockets, apart from those of tokens.

Asking: each peer has a window of requests; one that says nothing for `patience_s` while it owes something has
failed, and is asked no more for a while. Lending: what is asked is queued, up to a limit, for the thread that
knows the blocks. Whatever fails, each block asked for is delivered once, in time or as None. Knows nothing of
pools, engines and what a slab means.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

import zmq

from ..transport import Codec, PeerUnreachable, ProtocolError, Security, advertised, bind, connect, send
from .wire import Fetch, Slab, checksum

log = logging.getLogger(__name__)

PATIENCE_S = 3.0
# a peer that failed is not asked again so soon
SHUNNED_S = 10.0
# requests of ours that a peer has at once, and requests of others that wait here
WINDOW = 8
MOST_WAITING = 256
TICK_S = 0.1
# who has not looked for so long was held up itself, and has not waited
HELD_UP_S = 0.5
# much more than our patience: a connection that is ended loses what was asked for without a word
SILENCE_MS = 20_000
# a peer that nobody has asked for so long is hung up on
IDLE_S = 60.0

T = TypeVar("T")
# hears each block that came, in the links' thread: index, and its slab or None
Deliver = Callable[[int, memoryview | None], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """What another worker wants. asker: whom to answer (`Links.lend`)."""

    asker: bytes
    fetch: Fetch


@dataclass(eq=False, slots=True)
class _Request:
    names: list[bytes]
    form: str
    deliver: Deliver
    left: set[int]


@dataclass(eq=False, slots=True)
class _Peer:
    socket: Any
    heard: float
    waiting: deque[_Request] = field(default_factory=deque)
    asked: dict[int, _Request] = field(default_factory=dict)


class PeerLinks:
    """`fetch` and `lend` may be called by any thread, after the end as well.

    on_asked: hears, in the links' thread, that `asked` has grown.

    Raises ValueError where an unsecured socket would listen beyond loopback.
    """

    def __init__(
        self,
        bind_to: str,
        security: Security | None,
        advertise_host: str | None = None,
        *,
        on_asked: Callable[[], None] = lambda: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.asked: deque[Asked] = deque()
        self.corrupt = 0
        self._security = security
        self._on_asked = on_asked
        self._patience_s = patience_s
        self._context: zmq.Context[Any] = zmq.Context()
        self._lender, bound = bind(self._context, zmq.ROUTER, bind_to, security, SILENCE_MS)
        self.endpoint = advertised(bound, advertise_host)
        self._codec: Codec[Fetch] = Codec(Fetch)
        self._answers: Codec[Slab] = Codec(Slab)
        self._peers: dict[str, _Peer] = {}
        self._shunned: dict[str, float] = {}
        self._tickets = 0
        self._looked = time.monotonic()
        self._inbox: deque[tuple[str, _Request]] = deque()
        self._outbox: deque[tuple[bytes, bytes, bytes | None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        # held while anything is handed to the thread, which takes nothing more once it closes
        self._handing = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="worker-peers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fetch(self, endpoint: str, names: list[bytes], form: str, deliver: Deliver) -> None:
        """Ask for blocks; each is delivered once, in time or as None."""
        request = _Request(names, form, deliver, set(range(len(names))))
        if not self._hand(self._inbox, (endpoint, request)):
            self._miss(request)

    def lend(self, asked: Asked, index: int, slab: bytes | None) -> None:
        """Answer for one block; None: it is not to be had."""
        name = asked.fetch.each[index]
        answer = Slab(
            ticket=asked.fetch.ticket, index=index, checksum=None if slab is None else checksum(name, slab)
        )
        self._hand(self._outbox, (asked.asker, self._answers.encode(answer), slab))

    def close(self) -> None:
        """Ends the thread; what is still owed to us is delivered as None."""
        with self._handing:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        if self._thread.ident is None:
            self._give_up()
            self._hang_up()
        else:
            self._thread.join()
        os.close(self._wake)

    def _hand(self, queue: deque[T], item: T) -> bool:
        """False after the end. Until then the descriptor that wakes the thread is surely ours."""
        with self._handing:
            if not self._closing:
                queue.append(item)
                os.eventfd_write(self._wake, 1)
            return not self._closing

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception:
                log.exception("KV blocks that were on their way are given up")
                self._give_up()
                # should it fail again at once, others get on meanwhile
                time.sleep(TICK_S)
        self._give_up()
        self._hang_up()

    def _turn(self) -> None:
        self._wait()
        now = time.monotonic()
        if now - self._looked > HELD_UP_S:
            for peer in self._peers.values():
                peer.heard = now
        self._looked = now
        while self._inbox:
            self._take(*self._inbox.popleft(), now)
        for peer in self._peers.values():
            self._read(peer, now)
        self._hear_askers()
        while self._outbox:
            self._answer(*self._outbox.popleft())
        self._judge(now)

    def _give_up(self) -> None:
        """Deliver all that is owed to us as None."""
        while self._inbox:
            self._miss(self._inbox.popleft()[1])
        for endpoint in [*self._peers]:
            self._drop(endpoint)

    def _wait(self) -> None:
        poller = zmq.Poller()
        for source in (self._lender, self._wake, *(peer.socket for peer in self._peers.values())):
            poller.register(source, zmq.POLLIN)
        if self._wake in dict(poller.poll(int(1000 * TICK_S))):
            os.eventfd_read(self._wake)

    def _take(self, endpoint: str, request: _Request, now: float) -> None:
        """A request of ours; one to a peer that failed just now is not made."""
        if self._shunned.get(endpoint, 0.0) > now:
            self._miss(request)
            return
        if endpoint not in self._peers:
            try:
                socket = connect(self._context, endpoint, self._security, uuid4().hex, SILENCE_MS)
            except zmq.ZMQError as error:
                self._shun(endpoint, f"cannot be connected to ({error})", now)
                self._miss(request)
                return
            self._peers[endpoint] = _Peer(socket, now)
        peer = self._peers[endpoint]
        if not peer.asked:
            peer.heard = now
        peer.waiting.append(request)
        self._ask(peer)

    def _ask(self, peer: _Peer) -> None:
        while peer.waiting and len(peer.asked) < WINDOW:
            request = peer.waiting.popleft()
            self._tickets += 1
            fetch = Fetch(ticket=self._tickets, names=b"".join(request.names), form=request.form)
            peer.asked[fetch.ticket] = request
            # what cannot be sent is not answered either, and judged by that
            try:
                send(peer.socket, self._codec.encode(fetch))
            except PeerUnreachable:
                return

    def _read(self, peer: _Peer, now: float) -> None:
        while True:
            try:
                frames = peer.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer.heard = now
            try:
                answer = self._answers.decode(frames[0].bytes)
            except ProtocolError as error:
                log.warning("a worker sent what is no KV block: %s", error)
                continue
            self._settle(peer, answer, frames[1].buffer if len(frames) == 2 else None)

    def _settle(self, peer: _Peer, answer: Slab, slab: memoryview | None) -> None:
        request = peer.asked.get(answer.ticket)
        if request is None or answer.index not in request.left:
            return
        if slab is not None and answer.checksum != checksum(request.names[answer.index], slab):
            self.corrupt += 1
            slab = None
        self._deliver(request, answer.index, slab)
        if not request.left:
            del peer.asked[answer.ticket]
            self._ask(peer)

    def _hear_askers(self) -> None:
        heard = False
        while True:
            try:
                asker, frame = self._lender.recv_multipart(zmq.NOBLOCK)
                fetch = self._codec.decode(frame)
            except zmq.Again:
                break
            except (ProtocolError, ValueError) as error:
                log.warning("a worker asked for what is no KV block: %s", error)
                continue
            asked = Asked(asker, fetch)
            if fetch.sound and len(self.asked) < MOST_WAITING:
                self.asked.append(asked)
                heard = True
            elif fetch.sound:
                for index in range(len(fetch.each)):
                    self.lend(asked, index, None)
        if heard:
            self._on_asked()

    def _answer(self, asker: bytes, header: bytes, slab: bytes | None) -> None:
        """An asker that is gone, or does not drain, gives up by itself."""
        try:
            send(self._lender, asker, header, *(() if slab is None else (slab,)))
        except PeerUnreachable as error:
            log.debug("a worker that asked for KV blocks cannot be answered: %s", error)

    def _judge(self, now: float) -> None:
        for endpoint, peer in [*self._peers.items()]:
            if peer.asked and now - peer.heard > self._patience_s:
                self._shun(endpoint, "gives no KV blocks", now)
                self._drop(endpoint)
            elif not peer.asked and now - peer.heard > IDLE_S:
                self._drop(endpoint)
        self._shunned = {endpoint: until for endpoint, until in self._shunned.items() if until > now}

    def _drop(self, endpoint: str) -> None:
        peer = self._peers.pop(endpoint)
        peer.socket.close()
        for request in (*peer.asked.values(), *peer.waiting):
            self._miss(request)

    def _miss(self, request: _Request) -> None:
        for index in sorted(request.left):
            self._deliver(request, index, None)

    def _deliver(self, request: _Request, index: int, slab: memoryview | None) -> None:
        """What its receiver does wrong is no fault of the peer's, and ends nobody else's blocks."""
        request.left.discard(index)
        try:
            request.deliver(index, slab)
        except Exception:
            log.exception("a KV block that was fetched could not be taken in")

    def _shun(self, endpoint: str, why: str, now: float) -> None:
        self._shunned[endpoint] = now + SHUNNED_S
        log.warning("the worker at %s %s: not asked for %g s", endpoint, why, SHUNNED_S)

    def _hang_up(self) -> None:
        self._lender.close()
        self._context.term()

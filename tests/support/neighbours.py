"""Workers that lend each other KV blocks: real engines over real sockets, and a peer that misbehaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq
from engines import Outcome, make_engine, make_submit

from decodefleet.worker.engine import Engine
from decodefleet.worker.peers.links import PeerLinks
from decodefleet.worker.peers.wire import Fetch, Slab
from decodefleet.worker.protocol import Peer
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.transport import Codec, Security, bind


class Neighbour:
    """An engine with links of its own."""

    def __init__(
        self, folder: Path, security: Security | None = None, *, patience_s: float = 20.0, **options: Any
    ) -> None:
        self.links = PeerLinks("tcp://127.0.0.1:0", security, patience_s=patience_s)
        self.links.start()
        options["tiers"] = {"kv_restore": "always", **options.get("tiers", {})}
        self.engine: Engine = make_engine(folder, peers=self.links, **options)

    def peer(self, blocks: int) -> Peer:
        return Peer(worker_id="w", incarnation="one", endpoint=self.links.endpoint, blocks=blocks)

    def submit(
        self, name: str, prompt: list[int], params: SamplingParams, peer: Peer | None = None, **fields: Any
    ) -> None:
        self.engine.submit(make_submit(name, prompt, params, peer=peer, **fields))

    @property
    def fetched(self) -> int:
        return self.engine.stats().tiers["peer"].restored_blocks

    def close(self) -> None:
        self.engine.close()


@contextmanager
def neighbours(folder: Path, count: int = 2, **options: Any) -> Iterator[list[Neighbour]]:
    made = [Neighbour(folder, **options) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def run_until_idle(each: Iterable[Neighbour]) -> dict[tuple[str, int], Outcome]:
    """Steps all in turn until none has work, with every invariant checked after each step."""
    all_of_them = [*each]
    outcomes: dict[tuple[str, int], Outcome] = {}
    while any(one.engine.has_work() for one in all_of_them):
        for one in all_of_them:
            if one.engine.has_work():
                for delta in one.engine.step():
                    outcome = outcomes.setdefault((delta.request_id, delta.index), Outcome())
                    outcome.tokens += delta.tokens
                    outcome.deltas.append(delta)
                one.engine.check_integrity()
    return outcomes


# answers one request: what to send for it, frames of one message each
Answer = Callable[[Fetch], Iterable[tuple[bytes, ...]]]


@contextmanager
def lying_peer(answer: Answer) -> Iterator[str]:
    """Speaks the protocol and lends whatever `answer` makes up; yields its endpoint."""
    context: zmq.Context[Any] = zmq.Context()
    socket, endpoint = bind(context, zmq.ROUTER, "tcp://127.0.0.1:0", None)
    over = threading.Event()

    def serve() -> None:
        codec: Codec[Fetch] = Codec(Fetch)
        while not over.is_set():
            if socket.poll(20):
                asker, frame = socket.recv_multipart()
                # who asked may have hung up
                with suppress(zmq.ZMQError):
                    for frames in answer(codec.decode(frame)):
                        socket.send_multipart((asker, *frames))
        socket.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield endpoint
    finally:
        over.set()
        thread.join()
        context.term()


def slab_frame(fetch: Fetch, index: int, checksum: int | None) -> bytes:
    return Codec(Slab).encode(Slab(ticket=fetch.ticket, index=index, checksum=checksum))

"""Peers of a router that do exactly what a test tells them, over real sockets and the real protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

import msgspec
import zmq
import zmq.asyncio

from decodefleet.worker.protocol import (
    Acknowledge,
    Fenced,
    Heartbeat,
    Hello,
    ModelCard,
    Placement,
    Pulse,
    Register,
    Rejected,
    RejectReason,
    StepOutput,
    Submit,
    TokenDelta,
    ToScheduler,
    ToWorker,
    Welcome,
    WorkerBrief,
    WorkerStats,
)
from decodefleet.worker.transport import Codec, bind, connect

M = TypeVar("M")

PATIENCE_S = 20.0

CARD = ModelCard(
    name="tiny",
    folder="",
    max_model_len=256,
    vocab_size=1000,
    block_size=16,
    hash_root=b"r" * 16,
    kv_bytes_per_token=256,
    eos_token_ids=(2,),
)


class TinyPeer:
    """A ROUTER socket that keeps what comes, until a test asks for it."""

    _alive: ClassVar[list[TinyPeer]] = []

    def __init__(self, context: zmq.asyncio.Context, union: Any) -> None:
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self.peer = b""
        self._codec: Codec[Any] = Codec(union)
        self._socket, self.endpoint = bind(context, zmq.ROUTER, "tcp://127.0.0.1:0", None)
        self._task = asyncio.create_task(self._run())
        TinyPeer._alive.append(self)

    async def wait(self, kind: type[M], accept: Callable[[M], bool] = lambda _: True) -> M:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.received.get()
                if isinstance(message, kind) and accept(message):
                    return message

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send_multipart([self.peer, self._codec.encode(message)], zmq.NOBLOCK)

    def send_raw(self, frame: bytes) -> None:
        self._socket.send_multipart([self.peer, frame], zmq.NOBLOCK)

    def die(self) -> None:
        """As a killed process does: without a word."""
        self._task.cancel()
        self._socket.close(linger=0)

    @staticmethod
    async def end_all() -> None:
        """For fixtures: no peer outlives its test."""
        peers, TinyPeer._alive = TinyPeer._alive, []
        for peer in peers:
            peer.die()
        await asyncio.gather(*(peer._task for peer in peers), return_exceptions=True)

    def on_message(self, message: Any) -> None:
        self.received.put_nowait(message)

    async def _run(self) -> None:
        while True:
            self.peer, frame = await self._socket.recv_multipart()
            self.on_message(self._codec.decode(frame))


class TinyScheduler(TinyPeer):
    """Greets routers; placements are the test's to send."""

    def __init__(self, context: zmq.asyncio.Context, epoch: int = 1, greets: bool = True) -> None:
        super().__init__(context, ToScheduler)
        self.epoch = epoch
        self.greets = greets
        self.knows_workers = True
        self.workers: tuple[WorkerBrief, ...] = ()
        self.fenced: tuple[Fenced, ...] = ()

    async def locate(self) -> tuple[str, int]:
        return self.endpoint, self.epoch

    def on_message(self, message: Any) -> None:
        if isinstance(message, Hello) and self.greets:
            self.send(
                Welcome(
                    epoch=self.epoch,
                    models=(CARD,),
                    ready=("tiny",) if self.knows_workers else (),
                    workers=self.workers if self.knows_workers else (),
                    fenced=self.fenced,
                )
            )
        super().on_message(message)


class TinyWorker(TinyPeer):
    """A worker whose every answer is the test's; reports to a scheduler like any other if it is given one."""

    def __init__(self, context: zmq.asyncio.Context, worker_id: str = "w0", card: ModelCard = CARD) -> None:
        super().__init__(context, ToWorker)
        self.worker_id = worker_id
        self.card = card
        self._context = context
        self._reporting: asyncio.Task[None] | None = None

    def placement(self, request_id: str = "a", attempt: int = 0) -> Placement:
        return Placement(
            request_id=request_id,
            attempt=attempt,
            worker_id=self.worker_id,
            incarnation="i0",
            endpoint=self.endpoint,
            epoch=1,
            predicted_s=0.01,
        )

    def pulse(self) -> None:
        self.send(Pulse(worker_id=self.worker_id, incarnation="i0"))

    def emit(self, submit: Submit, *tokens: int, **fields: Any) -> None:
        delta = TokenDelta(request_id=submit.request_id, attempt=submit.attempt, tokens=tokens, **fields)
        self.send(StepOutput(worker_id=self.worker_id, incarnation="i0", step=1, deltas=(delta,)))

    def reject(self, submit: Submit, reason: RejectReason, field: str | None = None) -> None:
        self.send(
            Rejected(
                request_id=submit.request_id,
                attempt=submit.attempt,
                reason=reason,
                message=f"no: {reason}",
                field=field,
            )
        )

    def report_to(self, locate: Callable[[], Awaitable[tuple[str, int]]]) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        self._reporting = asyncio.create_task(self._report(locate))

    def hide(self) -> None:
        """Routers reach it no more; the scheduler does."""
        super().die()

    def die(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        super().die()

    async def _report(self, locate: Callable[[], Awaitable[tuple[str, int]]]) -> None:
        endpoint, _ = await locate()
        socket = connect(self._context, endpoint, None, self.worker_id)
        codec: Codec[Acknowledge] = Codec(Acknowledge)
        stats = WorkerStats(total_blocks=1000, free_blocks=1000, max_running=100)
        register = Register(
            worker_id=self.worker_id,
            incarnation="i0",
            endpoint=self.endpoint,
            card=self.card,
            stats=stats,
        )
        try:
            socket.send(codec.encode(register))
            while True:
                await asyncio.sleep(0.1)
                socket.send(codec.encode(Heartbeat(worker_id=self.worker_id, incarnation="i0", stats=stats)))
        finally:
            socket.close(linger=0)

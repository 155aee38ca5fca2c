"""A router with the real scheduler server, and workers that do what the test says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio
from tiny_peers import CARD, PATIENCE_S, TinyWorker
from waiting import eventually

from decodefleet.cluster.generation import Generation
from decodefleet.cluster.router import Caller, Router, RouterSettings
from decodefleet.cluster.scheduling.server import SchedulerServer
from decodefleet.cluster.sequence_text import Piece
from decodefleet.worker.protocol import Submit
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.text.tokenizer import Tokenizer


class Scene:
    """A router, a scheduler, and workers by name."""

    def __init__(self, context: zmq.asyncio.Context, folder: Path, scheduler: SchedulerServer) -> None:
        self.scheduler = scheduler
        self.card = msgspec.structs.replace(
            CARD, folder=str(folder), vocab_size=49152, eos_token_ids=(2,), max_model_len=256
        )
        self.tokenizer = Tokenizer.from_folder(folder)
        self.router = Router(self.locate, None, RouterSettings())
        self.workers: dict[str, TinyWorker] = {}
        self.context = context
        self._number = 0

    async def locate(self) -> tuple[str, int]:
        return self.scheduler.endpoint, self.scheduler.epoch

    async def add_workers(self, *names: str) -> None:
        for name in names:
            await self.add_worker(TinyWorker(self.context, name, self.card))

    async def add_worker(self, worker: TinyWorker) -> None:
        self.workers[worker.worker_id] = worker
        worker.report_to(self.locate)
        await eventually(lambda: len(self.scheduler.core.fleet) == len(self.workers))
        await eventually(lambda: "tiny" in self.router.ready)

    async def generation(self, prompt: list[int] | None = None, **params: Any) -> Generation:
        self._number += 1
        options = {"max_tokens": 8, **params}
        request = await self.router.prepare(
            f"request-{self._number}", self.card, prompt or [5, 6, 7], SamplingParams(**options), Caller()
        )
        return self.router.generation(request)

    async def submitted(self) -> tuple[TinyWorker, Submit]:
        """The next Submit, at whichever worker it arrives."""
        waits = {asyncio.create_task(worker.wait(Submit)): worker for worker in self.workers.values()}
        try:
            (task, *_), _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[task], task.result()
        finally:
            for task in waits:
                task.cancel()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def at_peace(self) -> None:
        """Every reservation is back, nothing waits, nothing is in flight."""
        core = self.scheduler.core
        await eventually(lambda: not [*core.ledger] and not [*core.queue])
        assert self.router.metrics.in_flight._value.get() == 0
        # what routers are scaled by
        assert self.router.streams == 0
        core.check_integrity()


async def collect(generation: Generation) -> list[Piece]:
    pieces: list[Piece] = []
    async with asyncio.timeout(PATIENCE_S):
        while (news := await generation.take()) is not None:
            pieces += news
    return pieces


def text_of(pieces: list[Piece], index: int = 0) -> str:
    return "".join(piece.text for piece in pieces if piece.index == index)

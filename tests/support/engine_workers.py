"""A worker on the wire whose tokens a real engine computes, as far as the test lets it."""

from __future__ import annotations

import zmq.asyncio
from tiny_peers import TinyWorker

from decodefleet.worker.engine_api import EngineLike
from decodefleet.worker.protocol import ModelCard, Moved, StepOutput, Submit, TokenDelta


class EngineWorker(TinyWorker):
    def __init__(
        self, context: zmq.asyncio.Context, worker_id: str, card: ModelCard, engine: EngineLike
    ) -> None:
        super().__init__(context, worker_id, card)
        self.engine = engine

    def compute(self, submit: Submit, steps: int | None = None) -> list[TokenDelta]:
        """Take the request, and send what the next so many steps with tokens bring, or all of it."""
        self.engine.submit(submit)
        sent: list[TokenDelta] = []
        while steps != 0 and self.engine.has_work():
            if deltas := self.engine.step():
                self._send(deltas)
                sent += deltas
                steps = None if steps is None else steps - 1
            self.engine.check_integrity()
        return sent

    def give_back(self, submit: Submit, why: Moved) -> None:
        """As a worker does that drains or fails: everything that lives goes on elsewhere."""
        self.engine.abort(submit.request_id, submit.attempt)
        self._send(
            [
                TokenDelta(
                    request_id=submit.request_id,
                    attempt=submit.attempt,
                    index=index,
                    finish_reason="error",
                    error="given back",
                    moved=why,
                )
                for index in submit.live
            ]
        )

    def _send(self, deltas: list[TokenDelta]) -> None:
        self.send(StepOutput(worker_id=self.worker_id, incarnation="i0", step=1, deltas=tuple(deltas)))

"""One request's life in the router: placed, relayed to its client, moved when its worker is lost, given back.

What the client has is the truth: whichever worker is lost, and whenever, the next one goes on behind it, and
what still comes of an older attempt is dropped. Given up in any state by `close`, which never waits. Knows
tokens and text, not HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time

from decodefleet.worker.protocol import TokenDelta, TokenLogprobs

from .attempt import Attempt, GenerationRequest, Known
from .dataplane.errors import DataplaneError, PlacementRefused
from .dataplane.scheduler_client import SchedulerClient
from .dataplane.worker_clients import WorkerClients
from .observability.timeline import Timeline
from .recovery import Recovery
from .sequence_text import Piece, SequenceText

log = logging.getLogger(__name__)


class Generation:
    """`start`, then `take` until it gives None; `close` in every case.

    prompt_logprobs: known with the first piece. timeline: what happened when.
    """

    def __init__(
        self,
        request: GenerationRequest,
        scheduler: SchedulerClient,
        workers: WorkerClients,
        timeline: Timeline,
    ) -> None:
        self.request = request
        self.timeline = timeline
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._scheduler = scheduler
        self._workers = workers
        self._sequences = [_sequence(request, index) for index in range(request.params.n)]
        self._recovery = Recovery()
        self._exclude: tuple[str, ...] = ()
        self._begun = False
        # when the worker of a stream that had begun was lost, until another goes on
        self._lost_at: float | None = None
        self._attempt = self._new_attempt(0)
        self._closed = False

    @property
    def cached_tokens(self) -> int:
        return self.timeline.cached_tokens

    @property
    def generated(self) -> int:
        return sum(len(sequence.emitted) for sequence in self._sequences)

    async def start(self) -> None:
        """Until a worker has the request. Raises DataplaneError."""
        while True:
            self.timeline.placing()
            try:
                self.timeline.placed(await self._attempt.place())
                self._attempt.submit()
            except DataplaneError as error:
                await self._try_again(error)
            else:
                return

    async def take(self) -> list[Piece] | None:
        """The next pieces, at least one; None at the end. Raises DataplaneError."""
        while not all(sequence.done for sequence in self._sequences):
            try:
                deltas = await self._attempt.take()
            except DataplaneError as error:
                await self._try_again(error)
                await self.start()
                continue
            self._begun, self._lost_at = True, None
            pieces = [piece for delta in deltas if (piece := self._push(delta)) is not None]
            if pieces:
                return pieces
        self.close()
        return None

    def close(self) -> None:
        """Give everything back: the worker stops, the reservation ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._attempt.close(self.generated, last=True)
        self.timeline.closed()

    async def _try_again(self, error: DataplaneError) -> None:
        """Put a new attempt in the place of the one that failed. Raises the error again where it is final."""
        failed, now = self._attempt, time.monotonic()
        again = self._recovery.after(error, progress=failed.progress, begun=self._begun)
        if self._begun and self._lost_at is None:
            self._lost_at = now
        deadline = self._deadline()
        if again is None or (deadline is not None and now + again.pause_s >= deadline):
            raise error
        log.warning("request %s: %s; trying again", self.request.request_id, error)
        self.timeline.moved(error)
        failed.close(0, last=False)
        # one that was refused has waited until whoever was lost may be back
        if failed.progress or isinstance(error, PlacementRefused):
            self._exclude = ()
        if again.avoid and failed.worker_id is not None:
            self._exclude = (*self._exclude, failed.worker_id)
        self._attempt = self._new_attempt(failed.number + 1)
        await asyncio.sleep(again.pause_s)

    def _new_attempt(self, number: int) -> Attempt:
        known = Known(
            tuple(() if sequence.done else tuple(sequence.emitted) for sequence in self._sequences),
            tuple(sequence.index for sequence in self._sequences if sequence.done),
            prompt_scored=self.prompt_logprobs is not None,
        )
        return Attempt(
            self.request,
            number,
            known,
            self._scheduler,
            self._workers,
            exclude=self._exclude,
            deadline=self._deadline(),
        )

    def _deadline(self) -> float | None:
        """Until when the next token must come, on the monotonic clock; None for any time."""
        since, limit = self.timeline.began, self.request.deadline_s
        if self._lost_at is not None:
            since, limit = self._lost_at, self.request.resume_s
        return None if limit is None else since + limit

    def _push(self, delta: TokenDelta) -> Piece | None:
        sequence = self._sequences[delta.index]
        if sequence.done:
            return None
        self.timeline.received(delta)
        if delta.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = delta.prompt_logprobs
        piece = sequence.push(delta)
        if piece.finish_reason is not None:
            self.timeline.finished(piece.finish_reason)
        if sequence.done and delta.finish_reason is None:
            # a stop string was found: only the router knows
            self._attempt.abort_sequence(delta.index)
        return piece


def _sequence(request: GenerationRequest, index: int) -> SequenceText:
    return SequenceText(
        index,
        request.tokenizer,
        request.params,
        prompt=request.prompt.tokens,
        eos_token_ids=request.card.eos_token_ids,
        skip_special_tokens=request.skip_special_tokens,
    )

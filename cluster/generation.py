"""One request's life in the router: place, submit, relay, release.

Before the first token a request may go to another worker; after it, the loss of its worker ends it. Given up
in any state by `close`, which never waits. Knows tokens and text, not HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from decodefleet.worker.protocol import ModelCard, Place, Placement, Submit, TokenDelta, TokenLogprobs
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.text.stream import TextStream
from decodefleet.worker.text.tokenizer import Tokenizer

from .dataplane.errors import DataplaneError, WorkerFailed, WorkerLost, WorkerRejected
from .dataplane.scheduler_client import SchedulerClient
from .dataplane.streams import TokenStream
from .dataplane.worker_clients import WorkerClients
from .observability.timeline import Timeline
from .text_service import Prompt

log = logging.getLogger(__name__)

Finish = Literal["stop", "length"]

MAX_ATTEMPTS = 3
# a worker that accepted a request and then says nothing is given this many times what was predicted
PATIENCE = 20.0
MIN_PATIENCE_S = 60.0

# another worker, or the same one later, may well take what was rejected for these reasons
_PASSING = {"incarnation", "epoch", "draining", "queue_full"}
# the worker itself is fine for these: only what the router knew of it was old
_OUTDATED = {"incarnation", "epoch"}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What is generated and for whom. `params` has its seed and max_tokens filled in.

    deadline_s: seconds from now until the first token; None for never.
    """

    request_id: str
    card: ModelCard
    prompt: Prompt
    params: SamplingParams
    tokenizer: Tokenizer
    skip_special_tokens: bool = True
    priority: int = 0
    tenant: str = ""
    session_id: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None


@dataclass(slots=True)
class Piece:
    """News of one sequence for the client.

    tokens: ids received, the end token included. logprobs and offsets: one per token whose text is out by
    now, where logprobs were asked for. stop_reason: the stop string or stop token that ended it.
    """

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None


class _Sequence:
    """One of a request's n sequences. `emitted` is the truth on what the client's text is made of."""

    def __init__(self, request: GenerationRequest, index: int) -> None:
        self.emitted: list[int] = []
        self.done = False
        self._index = index
        self._eos = frozenset(request.card.eos_token_ids)
        self._text = TextStream(
            request.tokenizer,
            request.params,
            prompt=request.prompt.tokens,
            skip_special_tokens=request.skip_special_tokens,
        )
        self._unaccounted: deque[TokenLogprobs] = deque()

    def push(self, delta: TokenDelta) -> Piece:
        self.emitted += delta.tokens
        self._unaccounted += delta.logprobs or ()
        # errors and aborts never come here
        reason: Finish | None = "stop" if delta.finish_reason == "stop" else None
        if delta.finish_reason == "length":
            reason = "length"
        finished = delta.finish_reason is not None
        news = self._text.push(delta.tokens, finished=finished, stop_token=delta.stop_token)
        ready = min(len(news.offsets), len(self._unaccounted))
        piece = Piece(
            index=self._index,
            text=news.text,
            tokens=delta.tokens,
            logprobs=tuple(self._unaccounted.popleft() for _ in range(ready)),
            offsets=news.offsets,
            finish_reason=reason,
        )
        if news.stop_match is not None:
            piece.finish_reason, piece.stop_reason = "stop", news.stop_match
        elif delta.stop_token is not None and delta.stop_token not in self._eos:
            piece.stop_reason = delta.stop_token
        self.done = piece.finish_reason is not None
        return piece


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
        self._sequences = [_Sequence(request, index) for index in range(request.params.n)]
        self._attempt = 0
        self._exclude: tuple[str, ...] = ()
        self._placement: Placement | None = None
        self._stream: TokenStream | None = None
        self._first_token = False
        self._closed = False

    @property
    def cached_tokens(self) -> int:
        return self.timeline.cached_tokens

    @property
    def generated(self) -> int:
        return sum(len(sequence.emitted) for sequence in self._sequences)

    async def start(self) -> None:
        """Until a worker has the request. Raises DataplaneError."""
        while self._stream is None:
            self.timeline.placing()
            placement = await self._scheduler.place(self._place())
            self.timeline.placed(placement)
            self._placement = placement
            try:
                self._stream = self._workers.submit(placement, self._submit(placement))
            except WorkerLost as error:
                self._prepare_retry(error)

    async def take(self) -> list[Piece] | None:
        """The next pieces, at least one; None at the end. Raises DataplaneError."""
        while not all(sequence.done for sequence in self._sequences):
            try:
                deltas = await self._deltas()
            except (WorkerLost, WorkerRejected) as error:
                self._prepare_retry(error)
                await self.start()
                continue
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
        if self._stream is not None:
            self._stream.close()
        self._scheduler.release(self.request.request_id, self._attempt, self.generated)
        self.timeline.closed()

    def _place(self) -> Place:
        request = self.request
        scored = request.params.prompt_logprobs is not None
        return Place(
            request_id=request.request_id,
            attempt=self._attempt,
            model=request.card.name,
            prompt_tokens=len(request.prompt.tokens),
            block_hashes=b"" if scored else request.prompt.block_hashes,
            max_new_tokens=(request.params.max_tokens or 0) * request.params.n,
            n=request.params.n,
            priority=request.priority,
            tenant=request.tenant,
            session_id=request.session_id,
            deadline_s=self._remaining(),
            exclude=self._exclude,
        )

    def _submit(self, placement: Placement) -> Submit:
        request = self.request
        return Submit(
            request_id=request.request_id,
            attempt=self._attempt,
            incarnation=placement.incarnation,
            epoch=placement.epoch,
            prompt=request.prompt.packed,
            block_hashes=request.prompt.block_hashes,
            hash_root=request.card.hash_root,
            params=request.params,
            priority=request.priority,
            deadline_s=self._remaining(),
            cache_salt=request.cache_salt,
        )

    def _remaining(self) -> float | None:
        deadline_s = self.request.deadline_s
        return None if deadline_s is None else max(0.0, self.timeline.began + deadline_s - time.monotonic())

    async def _deltas(self) -> list[TokenDelta]:
        assert self._stream is not None
        if self._first_token:
            return await self._stream.take()
        predicted = self._placement.predicted_s if self._placement is not None else 0.0
        try:
            async with asyncio.timeout(max(MIN_PATIENCE_S, PATIENCE * predicted)):
                return await self._stream.take()
        except TimeoutError:
            raise WorkerLost("the worker took the request and said no more") from None

    def _prepare_retry(self, error: DataplaneError) -> None:
        """Raise the error again, unless another worker may take the request."""
        passing = isinstance(error, WorkerLost) or (
            isinstance(error, WorkerRejected) and error.rejected.reason in _PASSING
        )
        if self._first_token or not passing or self._attempt + 1 >= MAX_ATTEMPTS:
            raise error
        log.warning("request %s: %s; trying again", self.request.request_id, error)
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        outdated = isinstance(error, WorkerRejected) and error.rejected.reason in _OUTDATED
        if self._placement is not None and not outdated:
            self._exclude = (*self._exclude, self._placement.worker_id)
        self._scheduler.release(self.request.request_id, self._attempt, 0, last=False)
        self.timeline.moved(error)
        self._attempt += 1

    def _push(self, delta: TokenDelta) -> Piece | None:
        if delta.finish_reason in ("error", "abort"):
            raise WorkerFailed(delta.error or "the worker gave the request up")
        sequence = self._sequences[delta.index]
        if sequence.done:
            return None
        self._receive(delta)
        piece = sequence.push(delta)
        if piece.finish_reason is not None:
            self.timeline.finished(piece.finish_reason)
        if sequence.done and delta.finish_reason is None and self._stream is not None:
            # a stop string was found: only the router knows
            self._stream.abort_sequence(delta.index)
        return piece

    def _receive(self, delta: TokenDelta) -> None:
        self.timeline.received(delta)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if not self._first_token:
            self._first_token = True
            self._scheduler.started(self.request.request_id, self._attempt)

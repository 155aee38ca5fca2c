"""One attempt of a request: a place asked for, a worker that computes, and both given back.

A later attempt tells its worker what the client has already, and gets what follows it. Knows nothing of text
and of what to do when an attempt fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from decodefleet.worker.kv.hashing import HASH_BYTES, extend_chain, request_root
from decodefleet.worker.protocol import ModelCard, Place, Placement, Submit, TokenDelta
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.text.tokenizer import Tokenizer

from .dataplane.errors import WorkerLost, WorkerRejected
from .dataplane.scheduler_client import SchedulerClient
from .dataplane.streams import TokenStream
from .dataplane.worker_clients import WorkerClients
from .text_service import Prompt

# a worker that accepted a request and then says nothing is given this many times what was predicted
PATIENCE = 20.0
MIN_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What is generated and for whom. `params` has seed and max_tokens filled in: all attempts sample alike.

    deadline_s: seconds from now until the first token; None for never. resume_s: the same for the next token
    when a worker was lost in the middle.
    """

    request_id: str
    card: ModelCard
    prompt: Prompt
    params: SamplingParams
    tokenizer: Tokenizer
    skip_special_tokens: bool = True
    priority: int = 0
    tenant: str = ""
    tenant_weight: float = 1.0
    authenticated: bool = False
    session_id: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None
    resume_s: float | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What earlier attempts brought: per sequence its tokens, and which sequences have ended."""

    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[int, ...] = ()
    prompt_scored: bool = False

    @property
    def live(self) -> list[int]:
        return [index for index in range(len(self.tokens)) if index not in self.ended]

    @property
    def emitted(self) -> int:
        """Tokens of the sequences that go on."""
        return sum(len(self.tokens[index]) for index in self.live)


class Attempt:
    """`place` and `submit`, then `take` for as long as wanted; `close` in every case.

    deadline: on the monotonic clock, until when it must bring its first token.
    """

    def __init__(
        self,
        request: GenerationRequest,
        number: int,
        known: Known,
        scheduler: SchedulerClient,
        workers: WorkerClients,
        *,
        exclude: Sequence[str],
        deadline: float | None,
    ) -> None:
        self.number = number
        self.progress = False
        self._request = request
        self._known = known
        self._scheduler = scheduler
        self._workers = workers
        self._exclude = tuple(exclude)
        self._deadline = deadline
        self._placement: Placement | None = None
        self._stream: TokenStream | None = None

    @property
    def worker_id(self) -> str | None:
        """Where it was placed, if it was."""
        return self._placement.worker_id if self._placement is not None else None

    async def place(self) -> Placement:
        """Until there is a worker for it. Raises DataplaneError."""
        self._placement = await self._scheduler.place(self._place())
        return self._placement

    def submit(self) -> None:
        """Raises WorkerLost where nothing can be sent."""
        assert self._placement is not None
        self._stream = self._workers.submit(self._placement, self._submit(self._placement))

    async def take(self) -> list[TokenDelta]:
        """The next deltas, at least one. Raises DataplaneError."""
        assert self._stream is not None
        assert self._placement is not None
        if self.progress:
            return await self._stream.take()
        try:
            async with asyncio.timeout(max(MIN_PATIENCE_S, PATIENCE * self._placement.predicted_s)):
                deltas = await self._stream.take()
        except WorkerRejected as error:
            if error.rejected.reason == "epoch":
                self._scheduler.outdated(max(error.rejected.epoch, self._placement.epoch + 1))
            raise
        except TimeoutError:
            # it may yet begin: it is told not to
            lost = WorkerLost(f"worker {self.worker_id} took the request and said no more")
            self._stream.abandon(lost)
            raise lost from None
        self.progress = True
        self._scheduler.started(self._request.request_id, self.number)
        return deltas

    def abort_sequence(self, index: int) -> None:
        if self._stream is not None:
            self._stream.abort_sequence(index)

    def close(self, generated: int, *, last: bool) -> None:
        """generated: tokens of all sequences, told with the last attempt."""
        if self._stream is not None:
            self._stream.close()
        self._scheduler.release(self._request.request_id, self.number, generated, last=last)

    def _remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _place(self) -> Place:
        request, known = self._request, self._known
        limit = (request.params.max_tokens or 0) * len(known.live)
        return Place(
            request_id=request.request_id,
            attempt=self.number,
            model=request.card.name,
            # sequences together may exceed what the model takes of one
            prompt_tokens=min(len(request.prompt.tokens) + known.emitted, request.card.max_model_len - 1),
            block_hashes=self._hashes(),
            max_new_tokens=limit - known.emitted,
            n=len(known.live),
            priority=request.priority,
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
            session_id=request.session_id,
            deadline_s=self._remaining(),
            exclude=self._exclude,
            emitted=known.emitted,
        )

    def _submit(self, placement: Placement) -> Submit:
        request, known = self._request, self._known
        return Submit(
            request_id=request.request_id,
            attempt=self.number,
            incarnation=placement.incarnation,
            epoch=placement.epoch,
            prompt=request.prompt.packed,
            block_hashes=request.prompt.block_hashes,
            hash_root=request.card.hash_root,
            params=self._params(),
            resume=known.tokens if any(known.tokens) else (),
            priority=request.priority,
            deadline_s=self._remaining(),
            cache_salt=request.cache_salt,
            ended=known.ended,
            peer=placement.peer,
        )

    def _params(self) -> SamplingParams:
        """A prompt that was scored before is not scored again, so that the cache can be read."""
        if not self._known.prompt_scored:
            return self._request.params
        return msgspec.structs.replace(self._request.params, prompt_logprobs=None)

    def _hashes(self) -> bytes:
        """Of the full blocks that the worker looks for; of the prompt's where several sequences go on."""
        request, known = self._request, self._known
        if self._params().prompt_logprobs is not None:
            return b""
        hashes = request.prompt.block_hashes
        if len(known.live) > 1 or not known.emitted:
            return hashes
        root = request_root(request.card.hash_root, cache_salt=request.cache_salt)
        size = request.card.block_size
        tokens = [*request.prompt.tokens, *known.tokens[known.live[0]]]
        rest = tokens[len(hashes) // HASH_BYTES * size :]
        return hashes + b"".join(extend_chain(hashes[-HASH_BYTES:] or root, rest, size))

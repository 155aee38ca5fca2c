"""The router: what turns a validated request into a generation. One per router process, on one event loop.

Owns the data-plane clients and the tokenizers; a request's life is `generation.py`'s. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from secrets import randbits, token_hex

import msgspec
import zmq.asyncio
from pydantic import Field

from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.config import Frozen
from decodefleet.worker.protocol import ModelCard
from decodefleet.worker.sampling_params import InvalidRequest, SamplingParams
from decodefleet.worker.transport import Security

from .attempt import GenerationRequest
from .dataplane.scheduler_client import Locate, SchedulerClient
from .dataplane.worker_clients import WorkerClients
from .generation import Generation
from .observability.router_metrics import RouterMetrics
from .observability.timeline import Timeline
from .text_service import TextService

log = logging.getLogger(__name__)


class RouterSettings(Frozen):
    """How one router behaves."""

    first_token_deadline_s: float | None = Field(
        300.0, gt=0, description="seconds that a request may wait for its first token; None for any"
    )
    resume_s: float | None = Field(
        120.0, gt=0, description="seconds that a stream may wait for another worker; None for any"
    )
    text_threads: int = Field(4, ge=1, description="threads that tokenize and hash")


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a request is served. authenticated: whether a key stands for the tenant.

    tenant_weight: its share, against others', when requests wait.
    """

    tenant: str = ""
    tenant_weight: float = 1.0
    authenticated: bool = False
    session_id: str = ""
    priority: int = 0
    cache_salt: str = ""


class Router:
    """`start` before use, `close` after."""

    def __init__(
        self, locate: Locate, security: Security | None, settings: RouterSettings | None = None
    ) -> None:
        self.router_id = f"router-{token_hex(8)}"
        self.metrics = RouterMetrics()
        self._settings = settings or RouterSettings()
        self._executor = ThreadPoolExecutor(self._settings.text_threads, thread_name_prefix="text")
        self._context = zmq.asyncio.Context()
        self._workers = WorkerClients(
            self._context,
            self.router_id,
            security,
            on_lost=lambda life: self._scheduler.suspect(life),
        )
        self._scheduler = SchedulerClient(
            self._context,
            self.router_id,
            locate,
            security,
            metrics=self.metrics.text,
            counts=self.metrics.counts,
            on_models=self._load_texts,
            on_fenced=self._workers.fence,
            on_stand_in=self.metrics.stand_ins.inc,
        )
        self._texts: dict[tuple[str, str], asyncio.Task[TextService]] = {}

    @property
    def models(self) -> Mapping[str, ModelCard]:
        return self._scheduler.models

    @property
    def streams(self) -> int:
        """Requests under way."""
        return self._scheduler.open_requests

    @property
    def routers(self) -> int:
        """How many there are, this one among them."""
        return self._scheduler.routers

    @property
    def ready(self) -> frozenset[str]:
        """Names of models of which some worker can generate, and whose tokenizer is loaded here."""
        loaded = {name for (name, _), task in self._texts.items() if task.done() and not _failed(task)}
        return self._scheduler.ready & loaded

    def start(self) -> None:
        """Needs a running event loop."""
        self._scheduler.start()

    def check_health(self) -> None:
        """Raises RuntimeError when it can place no request any more. Without a scheduler it still can."""
        self._scheduler.check_health()

    async def introduce(self, limit_s: float) -> None:
        """Until a model is known and its tokenizer loaded, for who is to answer at once; at most so long."""
        with contextlib.suppress(TimeoutError, ModelError):
            async with asyncio.timeout(limit_s):
                await self._scheduler.introduced.wait()
                await asyncio.gather(*(self.text(card) for card in self.models.values()))

    async def close(self) -> None:
        self._workers.close()
        await self._scheduler.close()
        for task in self._texts.values():
            task.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(linger=500)

    async def text(self, card: ModelCard) -> TextService:
        """The model's tokenizer, loaded once. Raises ModelError; a failure is tried again next time."""
        self._load_texts([card])
        service = await asyncio.shield(self._texts[_text_key(card)])
        # a new incarnation of the model's workers may have another card
        return service if service.card == card else service.for_card(card)

    def _load_texts(self, cards: Sequence[ModelCard]) -> None:
        """Begin loading what is not loaded: a model's first request shall not wait for its tokenizer."""
        for card in cards:
            known = self._texts.get(_text_key(card))
            if known is None or _failed(known):
                loading = asyncio.create_task(TextService.load(card, self._executor))
                loading.add_done_callback(_log_failure)
                self._texts[_text_key(card)] = loading

    async def prepare(
        self,
        request_id: str,
        card: ModelCard,
        tokens: list[int],
        params: SamplingParams,
        caller: Caller,
        *,
        skip_special_tokens: bool = True,
    ) -> GenerationRequest:
        """A request that fits its model, hashed. Raises InvalidRequest."""
        params = self._admit(card, tokens, params)
        text = await self.text(card)
        return GenerationRequest(
            request_id=request_id,
            card=card,
            prompt=await text.hash(tokens, caller.cache_salt),
            params=params,
            tokenizer=text.tokenizer,
            skip_special_tokens=skip_special_tokens,
            priority=caller.priority,
            tenant=caller.tenant,
            tenant_weight=caller.tenant_weight,
            authenticated=caller.authenticated,
            session_id=caller.session_id,
            cache_salt=caller.cache_salt,
            deadline_s=self._settings.first_token_deadline_s,
            resume_s=self._settings.resume_s,
        )

    def generation(self, request: GenerationRequest) -> Generation:
        """Not started yet; its `close` is the caller's."""
        timeline = Timeline(
            request.request_id,
            request.card.name,
            len(request.prompt.tokens),
            self.metrics,
            tenant=request.tenant,
            authenticated=request.authenticated,
            n=request.params.n,
        )
        return Generation(request, self._scheduler, self._workers, timeline)

    def _admit(self, card: ModelCard, tokens: list[int], params: SamplingParams) -> SamplingParams:
        """Check a request against the model's limits, and settle its seed and length.

        Raises InvalidRequest with the numbers.
        """
        count, room = len(tokens), card.max_model_len - len(tokens)
        if count == 0:
            raise InvalidRequest("prompt", "the prompt must have at least one token")
        if room < (params.max_tokens != 0):
            raise InvalidRequest(
                "prompt",
                f"the prompt has {count} tokens, which leaves no room for an answer: "
                f"the model takes {card.max_model_len} tokens in all",
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequest(
                "max_tokens",
                f"{params.max_tokens} more tokens than the {count} of the prompt do not fit: "
                f"the model takes {card.max_model_len} in all",
            )
        ids = {"prompt": tokens, "stop_token_ids": params.stop_token_ids, "logit_bias": params.logit_bias}
        for name, values in ids.items():
            if max(values, default=0) >= card.vocab_size:
                raise InvalidRequest(name, f"token ids must be below {card.vocab_size}")
        return msgspec.structs.replace(
            params,
            seed=randbits(63) if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
        )


def _text_key(card: ModelCard) -> tuple[str, str]:
    return card.name, card.folder


def _failed(task: asyncio.Task[TextService]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _log_failure(task: asyncio.Task[TextService]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a tokenizer cannot be loaded: %s", error)

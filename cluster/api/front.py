"""What every endpoint needs: the router, the settings, and how answers are carried to a client.

Watches the client while it waits, so that a disconnect ends the work in any state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from decodefleet.worker.protocol import ModelCard
from decodefleet.worker.sampling_params import InvalidRequest, SamplingParams

from ..access.keys import Grant
from ..access.limiter import Limiter
from ..access.salt import cache_salt
from ..router import Caller, Router
from .answers import Answers, drop
from .auth import tenant_of
from .body import read_body
from .errors import ApiError, Internal, Unavailable, UnknownModel, api_error
from .fleet_source import FleetSource
from .schemas import MAX_KEY, GenerationFields
from .settings import ApiSettings
from .sse import DONE, EventStream, event, left

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class ClientLeft(Exception):
    """Nobody is there to answer."""


@dataclass(frozen=True)
class Front:
    """fleet: where the scheduler is asked about the whole of it. limiter: of tenants."""

    router: Router
    settings: ApiSettings
    fleet: FleetSource
    limiter: Limiter
    started: int = field(default_factory=lambda: int(time.time()))

    async def body(self, request: Request, model: type[M]) -> M:
        return await read_body(request, model, self.settings.max_body_bytes, self.settings.body_s)

    def card(self, name: str | None) -> ModelCard:
        """Raises UnknownModel, or Unavailable where no model is known yet."""
        models = self.router.models
        if not models:
            raise Unavailable("no model is being served yet", code="no_worker", retry_after_s=1.0)
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        card = models.get(name or "")
        if card is None:
            raise UnknownModel(name or "", sorted(models))
        return card

    async def answers(
        self,
        request: Request,
        answer_id: str,
        card: ModelCard,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        body: GenerationFields,
    ) -> Answers:
        """Generations of all prompts, not started yet. Raises InvalidRequest or LimitReached before any of
        them exists."""
        grant: Grant = request.state.grant
        caller = Caller(
            tenant=tenant_of(grant, body.user),
            tenant_weight=grant.weight,
            authenticated=bool(grant.tenant),
            session_id=body.session_id or _session(request),
            priority=max(body.priority or 0, grant.priority),
            cache_salt=cache_salt(grant.tenant, body.cache_salt or ""),
        )
        # all are checked first: what is made after this must be closed
        requests = [
            await self.router.prepare(
                answer_id if len(prompts) == 1 else f"{answer_id}-{number}",
                card,
                tokens,
                params,
                caller,
                skip_special_tokens=body.skip_special_tokens is not False,
            )
            for number, tokens in enumerate(prompts)
        ]
        admitted = await self.limiter.admit(grant, sum(map(len, prompts)))
        answers = Answers([self.router.generation(prepared) for prepared in requests], admitted.close)
        request.state.exchange.timelines += [generation.timeline for generation in answers.generations]
        return answers

    async def stream(
        self, request: Request, answers: Answers, events: AsyncGenerator[bytes, None]
    ) -> Response:
        """A refusal is a status as long as no more than a ping's time has passed, and an event after that."""
        starting = asyncio.ensure_future(answers.start())
        try:
            await unless_left(request, asyncio.wait({starting}, timeout=self.settings.ping_s))
            if starting.done():
                starting.result()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, ClientLeft):
                note_failure(request, error)
            drop(starting)
            answers.close()
            raise

        def close() -> None:
            drop(starting)
            answers.close()

        return EventStream(
            _guarded(starting, events, request), close, self.settings.ping_s, self.settings.stall_s
        )

    async def collect(self, request: Request, answers: Answers, work: Coroutine[Any, Any, T]) -> T:
        """Start the answers and do the work on them, unless the client leaves."""

        async def start_and_work() -> T:
            await answers.start()
            return await work

        try:
            return await unless_left(request, start_and_work())
        except ClientLeft:
            raise
        except Exception as error:
            note_failure(request, error)
            raise
        finally:
            work.close()
            answers.close()


async def _guarded(
    starting: asyncio.Future[None], events: AsyncGenerator[bytes, None], request: Request
) -> AsyncGenerator[bytes, None]:
    """The events, with any failure as one of them, and the end mark."""
    try:
        await starting
        async for data in events:
            yield data
    except Exception as error:
        told = note_failure(request, error)
        if isinstance(told, Internal):
            log.exception("a stream failed")
        yield event(told.body)
    yield DONE


def note_failure(request: Request, error: Exception) -> ApiError:
    """For log, metrics and trace; returns what the client is told."""
    told = api_error(error, getattr(request.state, "field_names", {}))
    request.state.exchange.failed(error, told.code)
    return told


def new_id(prefix: str) -> str:
    """No two alike, whoever has seeded Python's own generator."""
    return f"{prefix}-{token_hex(16)}"


def encode(answer: msgspec.Struct) -> bytes:
    return _encode(answer)


def json_response(answer: msgspec.Struct) -> Response:
    return Response(_encode(answer), media_type="application/json")


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the client goes away. Raises ClientLeft then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _session(request: Request) -> str:
    """For clients whose libraries add headers more easily than fields."""
    session = request.headers.get("x-session-id", "")
    if len(session) > MAX_KEY:
        raise InvalidRequest("x-session-id", f"takes {MAX_KEY} characters at most")
    return session

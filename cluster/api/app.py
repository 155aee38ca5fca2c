"""The FastAPI application: which path is which endpoint, who may call it, and how failures look."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decodefleet.worker.sampling_params import InvalidRequest
from decodefleet.worker.text.chat import ChatTemplateError

from ..access.keyring import Keyring
from ..access.limiter import Limiter, LimitReached
from ..dataplane.errors import DataplaneError
from ..router import Router
from . import service, wire
from .auth import authenticator
from .chat import create_chat_completion
from .completions import create_completion
from .directory import find_prompt, show_directory
from .errors import ApiError, BadRequest, NotFound, WrongMethod
from .fleet_source import FleetSource
from .front import ClientLeft, Front, note_failure
from .hardening import Hardened
from .observe import Observe
from .openapi import body_of, document, responses
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, DirectoryRequest, TokenizeRequest
from .settings import ApiSettings
from .static_page import StaticPage
from .tokens import detokenize, tokenize

if TYPE_CHECKING:
    from ..observability.spans import Tracing

log = logging.getLogger(__name__)

CLIENT_LEFT = 499
FAILURES = (
    *(ApiError, InvalidRequest, DataplaneError, ChatTemplateError, ClientLeft, HTTPException),
    LimitReached,
)

Endpoint = Callable[[Front, Request], Awaitable[Response]]


def build_app(
    router: Router,
    settings: ApiSettings,
    *,
    fleet: FleetSource,
    tracing: Tracing | None = None,
    limiter: Limiter | None = None,
) -> FastAPI:
    """The public endpoint. Starting and closing router and tracing is the caller's.

    limiter: of tenants; if not given one of this router alone. Raises UnusableKeys.
    """
    app = FastAPI(
        title="decodefleet",
        version=service.own_version(),
        description="Large language models behind an OpenAI-compatible API",
        redoc_url=None,
        redirect_slashes=False,
    )
    front = Front(router, settings, fleet, limiter or Limiter())
    keyring = Keyring(settings.api_keys, settings.api_key_file)
    app.include_router(_page())
    app.include_router(_public(front))
    app.include_router(_protected(front, keyring))
    app.include_router(_debug(front, keyring))
    for failure in FAILURES:
        app.add_exception_handler(failure, _answer_failure)
    app.add_middleware(Defects)
    app.add_middleware(Hardened, allowed_origins=settings.allowed_origins)
    app.add_middleware(Observe, metrics=router.metrics, settings=settings, tracing=tracing)
    app.openapi = lambda: document(app, router.models.values())  # type: ignore[method-assign]
    return app


def _page() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    page = StaticPage()

    @routes.get("/")
    async def index(request: Request) -> Response:
        return page.index(request)

    @routes.get("/page/{name}")
    async def file(request: Request, name: str) -> Response:
        return page.file(request, name)

    return routes


def _public(front: Front) -> APIRouter:
    routes = APIRouter(tags=["service"])
    add = partial(_add, routes, front, "GET")
    add("/health", service.health, responses(wire.Status))
    add("/ready", service.ready, responses(wire.Status, 503))
    add("/metrics", service.metrics, responses(None, 503, media_type="text/plain"))
    add("/version", service.show_version, responses(wire.Version))
    return routes


def _protected(front: Front, keyring: Keyring) -> APIRouter:
    routes = APIRouter(dependencies=[Depends(authenticator(keyring))])
    get, post = partial(_add, routes, front, "GET"), partial(_add, routes, front, "POST")
    generating = (400, 401, 404, 408, 413, 429, 503, 504)
    get("/v1/models", service.list_models, responses(wire.ModelList, 401))
    get(
        "/v1/models/{model_id:path}", service.get_model, responses(wire.Model, 401, 404, 503), extra=_MODEL_ID
    )
    post(
        "/v1/completions",
        create_completion,
        responses(wire.Completion, *generating, stream=wire.Completion),
        extra=body_of(CompletionRequest),
    )
    post(
        "/v1/chat/completions",
        create_chat_completion,
        responses(wire.ChatCompletion, *generating, stream=wire.ChatChunk),
        extra=body_of(ChatRequest),
    )
    reading = (400, 401, 404, 408, 413, 503)
    post("/tokenize", tokenize, responses(wire.Tokens, *reading), extra=body_of(TokenizeRequest))
    post("/detokenize", detokenize, responses(wire.Prompt, *reading), extra=body_of(DetokenizeRequest))
    return routes


def _debug(front: Front, keyring: Keyring) -> APIRouter:
    """What tells of all tenants, so not for each of them."""
    routes = APIRouter(dependencies=[Depends(authenticator(keyring, admin=True))])
    get, post = partial(_add, routes, front, "GET"), partial(_add, routes, front, "POST")
    get("/debug/placements", service.placements, responses(None, 401, 403, 404, 503), extra=_REQUEST_ID)
    get("/debug/directory", show_directory, responses(None, 401, 403, 503))
    reading = (400, 401, 403, 404, 408, 413, 503)
    post("/debug/directory", find_prompt, responses(None, *reading), extra=body_of(DirectoryRequest))
    get("/debug/fleet", service.fleet, responses(None, 400, 401, 403, 503), extra=_SINCE)
    return routes


def _add(
    routes: APIRouter,
    front: Front,
    method: str,
    path: str,
    endpoint: Endpoint,
    declared: dict[int | str, dict[str, Any]],
    extra: dict[str, Any] | None = None,
) -> None:
    async def handle(request: Request) -> Response:
        return await endpoint(front, request)

    routes.add_api_route(
        path,
        handle,
        methods=[method],
        name=endpoint.__name__,
        description=endpoint.__doc__,
        response_class=Response,
        responses=declared,
        openapi_extra=extra,
    )


_MODEL_ID = {
    "parameters": [
        {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
}
_REQUEST_ID = {
    "parameters": [
        {"name": "request_id", "in": "query", "required": False, "schema": {"type": "string", "minLength": 1}}
    ]
}
_SINCE = {"parameters": [{"name": "since", "in": "query", "required": False, "schema": {"type": "number"}}]}


async def _answer_failure(request: Request, failure: Exception) -> Response:
    if isinstance(failure, ClientLeft):
        return Response(status_code=CLIENT_LEFT)
    if isinstance(failure, ChatTemplateError):
        failure = BadRequest(str(failure), param="messages")
    if isinstance(failure, HTTPException):
        failure = _from_http(request, failure)
    return _response(note_failure(request, failure))


class Defects:
    """ASGI middleware: an endpoint's defect is an answer, counted and dressed like all others.

    Starlette's own handler of exceptions stands outside of every middleware.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except Exception as failure:
            if scope["type"] != "http":
                raise
            log.error("an endpoint failed", exc_info=failure)
            answer = _response(note_failure(Request(scope), failure))
            if begun:
                raise
            await answer(scope, receive, send)


def _from_http(request: Request, failure: HTTPException) -> ApiError:
    """What Starlette itself refuses."""
    if failure.status_code == 404:
        return NotFound(f"there is no {request.url.path[:200]}", code="unknown_path")
    if failure.status_code == 405:
        allowed = (failure.headers or {}).get("Allow", "")
        return WrongMethod(f"{request.method} is not allowed here", code="method_not_allowed", allow=allowed)
    return BadRequest(str(failure.detail))


def _response(error: ApiError) -> Response:
    return Response(
        error.body, status_code=error.status, headers=error.headers, media_type="application/json"
    )

"""Endpoints about the service itself: models, health, readiness, metrics, placements, version."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from decodefleet.worker.protocol import ModelCard

from .errors import BadRequest, NotFound, Unavailable
from .front import Front, json_response
from .wire import Model, ModelList, Status, Version

log = logging.getLogger(__name__)

T = TypeVar("T")


async def list_models(front: Front, _request: Request) -> Response:
    """The models that are served, as far as known here."""
    return json_response(ModelList(data=[_model(front, card) for card in front.router.models.values()]))


async def get_model(front: Front, request: Request) -> Response:
    """One model, by its served name."""
    return json_response(_model(front, front.card(request.path_params["model_id"])))


async def health(_front: Front, _request: Request) -> Response:
    """The process lives: nothing is said of workers."""
    return json_response(Status(status="ok"))


async def ready(front: Front, _request: Request) -> Response:
    """Some worker can generate."""
    if not front.router.ready:
        raise Unavailable("no worker can generate yet", code="not_ready", retry_after_s=1.0)
    return json_response(Status(status="ready"))


async def metrics(front: Front, _request: Request) -> Response:
    """The whole fleet's metrics for Prometheus, from any router."""
    text = await ask_scheduler(front.fleet.metrics())
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def placements(front: Front, request: Request) -> Response:
    """The scheduler's decisions with their terms, newest first; those on one `request_id`, oldest first."""
    request_id = request.query_params.get("request_id")
    found = await ask_scheduler(front.fleet.placements(request_id))
    if request_id is not None and not found:
        raise NotFound(f"no placement of {request_id[:200]!r} is remembered", param="request_id")
    return Response(msgspec.json.encode(found), media_type="application/json")


async def fleet(front: Front, request: Request) -> Response:
    """The fleet as it is now, and its recent past: that after `since`, in Unix time, if it is given."""
    given = request.query_params.get("since", "0")
    try:
        since = float(given)
    except ValueError:
        raise BadRequest("since must be a number: seconds of Unix time", param="since") from None
    found = await ask_scheduler(front.fleet.overview(since))
    return Response(msgspec.json.encode(found), media_type="application/json")


async def show_version(_front: Front, _request: Request) -> Response:
    """The version of this router."""
    return json_response(Version(version=own_version()))


async def ask_scheduler(question: Awaitable[T]) -> T:
    """What is asked goes to another process, which may be away; how that shows is not ours to know."""
    try:
        return await question
    except Exception as error:
        log.warning("the scheduler cannot be asked: %r", error)
        raise Unavailable("the scheduler is away", code="no_scheduler", retry_after_s=1.0) from error


def own_version() -> str:
    try:
        return version("decodefleet")
    except PackageNotFoundError:
        return "unknown"


def _model(front: Front, card: ModelCard) -> Model:
    return Model(id=card.name, created=front.started, root=card.name, max_model_len=card.max_model_len)

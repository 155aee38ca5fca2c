"""The OpenAPI document: request schemas by pydantic, answers by msgspec, limits from the models served."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from decodefleet.worker.protocol import ModelCard

from . import wire
from .errors import ErrorResponse
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, DirectoryRequest, TokenizeRequest

REF = "#/components/schemas/{model}"
_REQUESTS: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DirectoryRequest,
    TokenizeRequest,
)
_ANSWERS = (
    ErrorResponse,
    wire.ChatChunk,
    wire.ChatCompletion,
    wire.Completion,
    wire.Model,
    wire.ModelList,
    wire.Prompt,
    wire.Status,
    wire.Tokens,
    wire.Version,
)
_ERRORS = {
    400: "The request is at fault; `param` names the field",
    401: "No valid API key",
    403: "The key is right, and not for this",
    404: "No such model or path",
    408: "The body does not come",
    413: "The body is too large",
    429: "The queue is full; see Retry-After",
    500: "A defect",
    503: "No worker can take it now; see Retry-After",
    504: "No token before the deadline",
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of an endpoint that reads its own body."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(model.__name__)}},
        }
    }


def responses(
    answer: type[msgspec.Struct] | None,
    *statuses: int,
    stream: type[msgspec.Struct] | None = None,
    media_type: str = "application/json",
) -> dict[int | str, dict[str, Any]]:
    """Success, with the stream's form where there is one, and these errors."""
    content: dict[str, Any] = {media_type: {"schema": _ref(answer.__name__) if answer is not None else {}}}
    if stream is not None:
        content["text/event-stream"] = {
            "schema": {
                "type": "object",
                "description": f"one event: a {stream.__name__} as JSON, or [DONE] at the end",
                "properties": {"data": {"type": "string"}},
                "required": ["data"],
            }
        }
    declared: dict[int | str, dict[str, Any]] = {200: {"description": "Success", "content": content}}
    for status in statuses:
        declared[status] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _ref(ErrorResponse.__name__)}},
        }
    return declared


def document(app: FastAPI, cards: Iterable[ModelCard]) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, requests = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=REF)
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template="#/components/schemas/{name}")
    components = schema.setdefault("components", {})
    components["schemas"] = {**requests["$defs"], **answers}
    for operations in schema["paths"].values():
        for operation in operations.values():
            # our endpoints answer 400 for whatever does not validate
            operation["responses"].pop("422", None)
    _describe_models(components["schemas"], list(cards))
    return schema


def _describe_models(schemas: dict[str, Any], cards: list[ModelCard]) -> None:
    """Narrow the fields whose limits are the served models'."""
    if not cards:
        return
    longest = max(card.max_model_len for card in cards)
    vocabulary = max(card.vocab_size for card in cards)
    for model in _REQUESTS:
        for name, field in schemas[model.__name__]["properties"].items():
            for branch in _branches(field):
                if name == "model" and branch.get("type") == "string":
                    branch["enum"] = [card.name for card in cards]
                elif name.endswith("_tokens") and branch.get("type") == "integer":
                    branch["maximum"] = longest - 1
                elif name in ("prompt", "tokens", "stop_token_ids"):
                    _limit_ids(branch, vocabulary)


def _limit_ids(field: dict[str, Any], vocabulary: int) -> None:
    if field.get("type") == "integer":
        field["maximum"] = vocabulary - 1
    elif "items" in field:
        _limit_ids(field["items"], vocabulary)


def _branches(field: dict[str, Any]) -> list[dict[str, Any]]:
    branches: list[dict[str, Any]] = field.get("anyOf", [field])
    return branches


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}

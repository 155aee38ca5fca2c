"""A request's JSON body: read with a limit, parsed strictly, validated, or refused naming the field.

msgspec parses, because it refuses what JSON does not have: NaN, lone surrogates, broken UTF-8.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from .errors import BadRequest, TooLarge, TooSlow

M = TypeVar("M", bound=BaseModel)

MAX_MESSAGE = 500


async def read_body(request: Request, model: type[M], limit: int, limit_s: float) -> M:
    """Raises TooLarge before more than `limit` bytes are kept, TooSlow where they take longer than `limit_s`,
    and BadRequest for all else."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise BadRequest(f"content type must be application/json, not {content_type[:100]!r}")
    try:
        async with asyncio.timeout(limit_s):
            raw = await _read(request, limit)
    except TimeoutError:
        raise TooSlow(f"the request body did not come within {limit_s:g} s", code="slow_request") from None
    document = parse(raw)
    if not isinstance(document, dict):
        raise BadRequest("the request body must be a JSON object")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _explain(error) from None


def parse(raw: bytes) -> Any:
    """Raises BadRequest for anything that is not JSON."""
    if not raw:
        raise BadRequest("the request body is empty")
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    chunks = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise BadRequest("the request body ended early") from None
    return b"".join(chunks)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {limit} bytes")


def _explain(error: ValidationError) -> BadRequest:
    """The first field at fault, with everything that is said of it."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    same_field = [detail for detail in details if detail["loc"][:1] == details[0]["loc"][:1]]
    # of a union's branches, the one that fits best is the one whose complaint lies deepest
    param = _param(max(same_field, key=lambda detail: len(_path(detail))))
    messages = dict.fromkeys(detail["msg"] for detail in same_field if _param(detail) == param)
    message = f"{param}: {'; or '.join(messages)}" if param else "; ".join(messages)
    return BadRequest(message[:MAX_MESSAGE], param=param)


def _param(detail: ErrorDetails) -> str | None:
    """`messages[0].content`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in _path(detail))
    return "".join(parts).removeprefix(".") or None


def _path(detail: ErrorDetails) -> list[int | str]:
    """Where in the body it is, without what pydantic adds to tell the branches of a union apart."""
    return [part for part in detail["loc"] if isinstance(part, int) or _names_field(part)]


def _names_field(part: str) -> bool:
    return part.isidentifier() and part not in ("str", "int", "float", "bool", "TextPart")

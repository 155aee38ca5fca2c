"""Every failure that a client can see, in one tree, in OpenAI's shape.

ApiError
├── BadRequest        400  the request is at fault; `param` names the field
├── Unauthorized      401
├── Forbidden         403  the key is right, and not for this
├── NotFound          404  no such path
│   └── UnknownModel       no such model
├── WrongMethod       405
├── TooSlow           408  the request does not come; the connection is closed
├── TooLarge          413
├── Overloaded        429  the queue is full, or the tenant's limit is reached; Retry-After
├── Internal          500  a defect of ours
├── Unavailable       503  no worker can take it, or the one that had it is gone; Retry-After
└── TooLate           504  no token before the deadline
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from decodefleet.worker.sampling_params import InvalidRequest

from ..access.limiter import LimitReached
from ..dataplane.errors import (
    DataplaneError,
    PlacementRefused,
    WorkerFailed,
    WorkerLost,
    WorkerMoved,
    WorkerRejected,
)


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """Body of every answer that is not a success, and of an error inside a stream."""

    error: ErrorBody


class ApiError(Exception):
    """Base of the tree above."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.response = ErrorResponse(ErrorBody(message, self.type, param, code))
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> str:
        """One of few words of ours."""
        return self.response.error.code or self.type

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.response)

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(ApiError):
    status = 401
    type = "authentication_error"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class Forbidden(ApiError):
    status = 403
    type = "permission_error"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class UnknownModel(NotFound):
    def __init__(self, name: str, served: list[str]) -> None:
        known = ", ".join(served) or "none"
        super().__init__(
            f"model {name[:200]!r} does not exist; served: {known}", param="model", code="model_not_found"
        )


class WrongMethod(ApiError):
    status = 405
    type = "invalid_request_error"

    def __init__(self, message: str, *, code: str, allow: str) -> None:
        super().__init__(message, code=code)
        self._allow = allow

    @property
    def headers(self) -> dict[str, str]:
        return {"allow": self._allow} if self._allow else {}


class TooSlow(ApiError):
    status = 408
    type = "invalid_request_error"

    @property
    def headers(self) -> dict[str, str]:
        # the rest of the request may come yet, and is not the next one's beginning
        return {"connection": "close"}


class TooLarge(ApiError):
    status = 413
    type = "invalid_request_error"


class Overloaded(ApiError):
    status = 429
    type = "rate_limit_error"


class Internal(ApiError):
    status = 500
    type = "internal_error"


class Unavailable(ApiError):
    status = 503
    type = "service_unavailable_error"


class TooLate(ApiError):
    status = 504
    type = "timeout_error"


RETRY_AFTER_S = 1.0


def api_error(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """What the client is told. names: how the request called our fields, where it called them otherwise."""
    names = names or {}
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            field = names.get(error.field, error.field)
            return BadRequest(f"{field}: {error.message}", param=field)
        case LimitReached():
            return Overloaded(str(error), code="rate_limit_exceeded", retry_after_s=error.retry_after_s)
        case PlacementRefused():
            refusal = error.refusal
            field = names.get("prompt", "prompt")
            return _by_reason(refusal.reason, refusal.message, field, refusal.retry_after_s)
        case WorkerRejected():
            rejected = error.rejected
            field = rejected.field or "prompt"
            return _by_reason(rejected.reason, rejected.message, names.get(field, field), None)
        case WorkerLost():
            return Unavailable(str(error), code="worker_lost", retry_after_s=RETRY_AFTER_S)
        case WorkerMoved():
            return Unavailable(str(error), code="worker_moved", retry_after_s=RETRY_AFTER_S)
        case WorkerFailed():
            return Unavailable(str(error), code="worker_failed", retry_after_s=RETRY_AFTER_S)
        case DataplaneError():
            return Unavailable(str(error), code="unavailable", retry_after_s=RETRY_AFTER_S)
    return Internal("internal error", code="internal_error")


def _by_reason(reason: str, message: str, field: str, retry_after_s: float | None) -> ApiError:
    retry = RETRY_AFTER_S if retry_after_s is None else retry_after_s
    match reason:
        case "queue_full":
            return Overloaded(message, code=reason, retry_after_s=retry)
        case "deadline":
            return TooLate(message, code=reason)
        case "too_long":
            return BadRequest(message, param=field, code="context_length_exceeded")
        case "invalid":
            return BadRequest(message, param=field)
        case "unknown_model":
            return NotFound(message, param="model", code="model_not_found")
    return Unavailable(message, code=reason, retry_after_s=retry)

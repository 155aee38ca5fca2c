"""From what can go wrong inside to what a client is told."""

from __future__ import annotations

import json

import pytest

from decodefleet.cluster.api.errors import RETRY_AFTER_S, api_error
from decodefleet.cluster.dataplane.errors import (
    ConsumerTooSlow,
    PlacementRefused,
    SchedulerSilent,
    WorkerFailed,
    WorkerLost,
    WorkerRejected,
)
from decodefleet.worker.protocol import Refusal, RefusalReason, Rejected, RejectReason
from decodefleet.worker.sampling_params import InvalidRequest


def refused(reason: RefusalReason, retry_after_s: float | None = None) -> PlacementRefused:
    return PlacementRefused(
        Refusal(request_id="a", reason=reason, message="why", retry_after_s=retry_after_s)
    )


def rejected(reason: RejectReason, field: str | None = None) -> WorkerRejected:
    return WorkerRejected(Rejected(request_id="a", reason=reason, message="why", field=field))


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (refused("queue_full"), 429, "queue_full"),
        (refused("deadline"), 504, "deadline"),
        (refused("no_worker"), 503, "no_worker"),
        (refused("unknown_model"), 404, "model_not_found"),
        (refused("too_long"), 400, "context_length_exceeded"),
        (rejected("queue_full"), 429, "queue_full"),
        (rejected("deadline"), 504, "deadline"),
        (rejected("draining"), 503, "draining"),
        (rejected("invalid", "top_k"), 400, None),
        (WorkerLost("gone"), 503, "worker_lost"),
        (WorkerFailed("broken"), 503, "worker_failed"),
        (SchedulerSilent("silent"), 503, "unavailable"),
        (ConsumerTooSlow("slow"), 503, "unavailable"),
        (InvalidRequest("n", "must be an integer"), 400, None),
        (RuntimeError("secret details"), 500, "internal_error"),
    ],
)
def test_every_reason_has_its_status(error: Exception, status: int, code: str | None) -> None:
    told = api_error(error)
    body = json.loads(told.body)["error"]
    assert (told.status, body["code"]) == (status, code)
    assert set(body) == {"message", "type", "param", "code"}
    assert "secret" not in body["message"]
    assert ("retry-after" in told.headers) == (status in (429, 503))


def test_retry_after_is_the_schedulers_in_whole_seconds() -> None:
    assert api_error(refused("queue_full", 2.1)).headers == {"retry-after": "3"}
    assert api_error(refused("queue_full", 0.0)).headers == {"retry-after": "1"}
    assert api_error(refused("no_worker")).headers == {"retry-after": str(int(RETRY_AFTER_S))}


def test_fields_are_called_as_the_client_called_them() -> None:
    names = {"prompt": "messages", "max_tokens": "max_completion_tokens"}
    for error, field in (
        (InvalidRequest("prompt", "too long"), "messages"),
        (InvalidRequest("max_tokens", "too many"), "max_completion_tokens"),
        (InvalidRequest("top_k", "too many"), "top_k"),
        (refused("too_long"), "messages"),
        (rejected("invalid", "prompt"), "messages"),
        (rejected("invalid", "top_k"), "top_k"),
    ):
        assert json.loads(api_error(error, names).body)["error"]["param"] == field

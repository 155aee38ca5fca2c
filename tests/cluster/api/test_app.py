"""What stands around all endpoints."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import pytest

from decodefleet.cluster.api.app import build_app
from decodefleet.cluster.api.settings import ApiSettings
from decodefleet.cluster.router import Router
from decodefleet.worker.protocol import ModelCard


class BrokenRouter(Router):
    """Meets a defect of ours when it is asked for its models."""

    @property
    def models(self) -> Mapping[str, ModelCard]:
        raise ZeroDivisionError


async def test_a_defect_is_an_answer_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    async def nowhere() -> tuple[str, int]:
        raise ConnectionError

    router = BrokenRouter(nowhere, None)
    transport = httpx.ASGITransport(build_app(router, ApiSettings(), fleet=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        answer = await client.get("/v1/models", headers={"x-request-id": "r-1"})
    counted = router.metrics.requests.labels("/v1/models", "500")._value.get()
    await router.close()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "ZeroDivision" not in answer.text
    assert answer.headers["x-request-id"] == "r-1"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert counted == 1
    assert "an endpoint failed" in caplog.text

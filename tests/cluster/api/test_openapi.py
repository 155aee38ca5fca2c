"""The OpenAPI document is complete: the fuzz and generated clients believe it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from decodefleet.cluster.api.app import build_app
from decodefleet.cluster.api.openapi import document
from decodefleet.cluster.api.schemas import UNSUPPORTED, ChatRequest, CompletionRequest
from decodefleet.cluster.api.settings import ApiSettings
from decodefleet.cluster.directory.holdings import Holdings
from decodefleet.cluster.router import Router
from decodefleet.worker.protocol import ModelCard

CARD = ModelCard(
    name="tiny",
    folder="",
    max_model_len=100,
    vocab_size=50,
    block_size=16,
    hash_root=b"",
    kv_bytes_per_token=1,
)


class NoFleet:
    """A scheduler that nobody asks."""

    async def metrics(self) -> str:
        raise AssertionError

    async def placements(self, request_id: str | None) -> list[dict[str, Any]]:
        raise AssertionError

    async def directory(self, model: str | None, prompt: bytes | None) -> Holdings:
        raise AssertionError

    async def overview(self, since: float) -> dict[str, Any]:
        raise AssertionError


@pytest.fixture
async def schema() -> Any:
    async def nowhere() -> tuple[str, int]:
        raise ConnectionError

    router = Router(nowhere, None)
    app = build_app(router, ApiSettings(), fleet=NoFleet())
    schema = document(app, [CARD])
    await router.close()
    return schema


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


async def test_every_reference_leads_somewhere(schema: dict[str, Any]) -> None:
    found = {*references(schema)}
    assert found
    for reference in found:
        name = reference.removeprefix("#/components/schemas/")
        assert name in schema["components"]["schemas"]
    msgspec.json.encode(schema)


async def test_generating_endpoints_declare_every_status(schema: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        operation = schema["paths"][path]["post"]
        assert {*operation["responses"]} == {"200", "400", "401", "404", "408", "413", "429", "503", "504"}
        assert {*operation["responses"]["200"]["content"]} == {"application/json", "text/event-stream"}
    for operations in schema["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]


async def test_limits_are_those_of_the_models_served(schema: dict[str, Any]) -> None:
    fields = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["model"]["anyOf"][0]["enum"] == ["tiny"]
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == 99
    assert fields["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 49
    token_lists = [branch for branch in fields["prompt"]["anyOf"] if branch.get("type") == "array"]
    assert token_lists[0]["items"]["maximum"] == 49


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_what_is_unsupported_is_no_field(model: Any) -> None:
    assert not UNSUPPORTED.keys() & model.model_fields.keys()

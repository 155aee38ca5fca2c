"""What HTTP clients see beside answers: errors in one shape, keys, limits, health, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest


@pytest.fixture(scope="module")
def http(stack: Any) -> Iterator[httpx.Client]:
    with stack.http() as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


BAD_BODIES = {
    "not JSON": b"{",
    "empty": b"",
    "not an object": b"[1]",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": 1e999}',
    "lone surrogate": b'{"prompt": "\\ud800x"}',
    "broken UTF-8": b'{"prompt": "\xff"}',
    "deep nesting": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "huge integer": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_what_is_not_json_is_refused(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


BAD_FIELDS = [
    ({"prompt": "x", "temperature": "1"}, "temperature"),
    ({"prompt": "x", "temperature": 3}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": True}, "n"),
    ({"prompt": "x", "stop": [""]}, "stop[0]"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 2048}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "seed": 1 << 64}, "seed"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"prompt": "x", "stop_token_ids": [99_999_999]}, "stop_token_ids"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "tools": [{"type": "function"}]}, "tools"),
    ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format"),
    ({"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"prompt": ["x"] * 129}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [99_999_999]}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": 1}, "prompt"),
    ({}, "prompt"),
    ({"prompt": "x " * 3000}, "prompt"),
]


@pytest.mark.parametrize(("body", "field"), BAD_FIELDS)
def test_the_field_at_fault_is_named(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == field
    assert field.partition("[")[0].partition(".")[0] in error["message"]


BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "functions": [{"name": "f"}]}, "functions"),
    ({"messages": [{"role": "user", "content": "x"}], "audio": {"voice": "a"}}, "audio"),
]


@pytest.mark.parametrize(("body", "field"), BAD_CHATS)
def test_the_field_at_fault_is_named_in_chats(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == field


def test_harmless_extras_are_ignored(http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi \u0000 there"}]}],
        "max_tokens": 2,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
        "store": True,
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_unknown_paths_methods_and_models(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing"))["code"] == "unknown_path"
    wrong = http.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert error_of(wrong)["code"] == "method_not_allowed"
    unknown = http.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert unknown.status_code == 404
    assert error_of(unknown)["code"] == "model_not_found"
    assert http.get("/v1/models/other").status_code == 404
    wrong_type = http.post("/v1/completions", content=b"a=1", headers={"content-type": "text/plain"})
    assert wrong_type.status_code == 400


def test_request_ids_are_echoed(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert http.get("/v1/nothing", headers={"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"
    assert len(http.get("/health").headers["x-request-id"]) == 32


def test_health_readiness_version_and_metrics(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json()["version"]
    metrics = http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "decodefleet_" in metrics.text


def test_tokenize_and_back(http: httpx.Client) -> None:
    text = "naïve 你好 🎉"
    tokens = http.post("/tokenize", json={"model": "tiny", "prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": text}]}).json()
    assert chat["count"] > tokens["count"]
    assert error_of(http.post("/tokenize", json={}))["param"] == "prompt"


def test_each_placement_can_be_looked_up(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "find me", "max_tokens": 1}).json()
    found = http.get("/debug/placements", params={"request_id": answer["id"]}).json()
    assert len(found) == 1
    assert len(found[0]["considered"]) == 2
    assert http.get("/debug/placements", params={"request_id": "nobody"}).status_code == 404


def test_requests_are_counted_by_endpoint_and_status(stack: Any, http: httpx.Client) -> None:
    def count(endpoint: str, status: str) -> float:
        counter = stack.router.metrics.requests.labels(endpoint, status)
        value: float = counter._value.get()
        return value

    before = count("/v1/completions", "200"), count("/v1/completions", "400"), count("other", "404")
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    http.post("/v1/completions", json={})
    http.get("/nothing/here")
    after = count("/v1/completions", "200"), count("/v1/completions", "400"), count("other", "404")
    assert after == tuple(value + 1 for value in before)


@pytest.fixture(scope="module")
def guarded(make_stack: Callable[..., Any]) -> Any:
    return make_stack(
        workers=1,
        secret="shared by the whole cluster",
        api_keys=("first-key", "second-key"),
        max_body_bytes=2000,
        max_num_seqs=1,
        step_s=0.01,
        ping_s=0.2,
        scheduling={"max_queue": 1},
    )


def test_keys_are_required_where_there_are_some(guarded: Any) -> None:
    with guarded.http() as http:
        for path in ("/health", "/ready"):
            assert http.get(path).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first-key"}):
            response = http.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert http.post("/v1/completions", json={}, headers=headers).status_code == 401
            assert http.get("/debug/placements", headers=headers).status_code == 401
        for key in ("first-key", "second-key"):
            assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_large_bodies_are_refused_streamed_ones_too(guarded: Any) -> None:
    headers = {"authorization": "Bearer first-key", "content-type": "application/json"}

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    with guarded.http() as http:
        for content in (b" " * 2001, chunks()):
            response = http.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 413
            error_of(response)


def test_overload_is_told_at_once_and_waiting_streams_are_kept_alive(guarded: Any) -> None:
    headers = {"authorization": "Bearer first-key"}
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with guarded.http() as http, http.stream("POST", "/v1/completions", json=body, headers=headers) as first:
        running = first.iter_lines()
        next(running)
        with http.stream("POST", "/v1/completions", json=body, headers=headers) as second:
            # it is queued, and its stream began all the same
            assert second.status_code == 200
            waiting = second.iter_lines()
            assert next(waiting) == ": ping"
            third = http.post("/v1/completions", json=body, headers=headers)
            assert third.status_code == 429
            assert int(third.headers["retry-after"]) >= 1
            assert error_of(third)["code"] == "queue_full"
            assert [line for line in running if line][-1] == "data: [DONE]"
            assert [line for line in waiting if line][-1] == "data: [DONE]"


def test_nothing_is_ready_without_workers(make_stack: Callable[..., Any]) -> None:
    with make_stack(workers=0).http() as http:
        assert http.get("/health").status_code == 200
        for response in (http.get("/ready"), http.post("/v1/completions", json={"prompt": "x"})):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            error_of(response)
        assert http.get("/v1/models").json()["data"] == []

"""Keys, tenants and limits over HTTP, and what an attacker tries: bypass, probing the cache, logs, paths."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from decodefleet.cluster.access.keys import Grant, to_line

KEYS = {
    "key-of-a": Grant(tenant="a"),
    "second-of-a": Grant(tenant="a"),
    "key-of-b": Grant(tenant="b", priority=5),
    "slow": Grant(tenant="slow", requests_per_minute=2),
    "thrifty": Grant(tenant="thrifty", tokens_per_minute=20),
    "narrow": Grant(tenant="narrow", max_concurrent=1),
    "heavy": Grant(tenant="heavy", weight=3),
    "boss": Grant(tenant="boss", admin=True),
}
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "ignore_eos": True, "prompt": "word " * 60}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("access") / "keys"
    file.write_text("".join(to_line(key, grant) + "\n" for key, grant in KEYS.items()))
    return file


@pytest.fixture(scope="module")
def stack(make_stack: Callable[..., Any], key_file: Path) -> Any:
    return make_stack(workers=1, api_key_file=key_file, api_keys=("bare",), step_s=0.005)


@pytest.fixture
def http(stack: Any) -> Iterator[httpx.Client]:
    with stack.http() as client:
        yield client


def ask(http: httpx.Client, key: str, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return http.post("/v1/completions", json=ASK | fields, headers=headers)


def cached(response: httpx.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_every_key_of_the_file_and_a_bare_one_are_accepted(http: httpx.Client) -> None:
    for key in (*KEYS, "bare"):
        assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer key-of",
        "Bearer key-of-a x",
        "Basic key-of-a",
        "Token key-of-a",
        "key-of-a",
        "Bearer KEY-OF-A",
        "Bearer sha256:",
        "Bearer key-of-a,key-of-b",
        "Bearer " + "x" * 8000,
        b"Bearer \xff\xfe",
        b"Bearer key-of-a\xc2\xa0",
    ],
)
def test_nothing_else_gets_in(http: httpx.Client, value: str | bytes) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/debug/fleet")):
        response = http.request(method, path, headers={"authorization": value}, json=ASK)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_the_hash_of_a_key_is_no_key(http: httpx.Client, key_file: Path) -> None:
    for word in key_file.read_text().split():
        assert http.get("/v1/models", headers={"authorization": f"Bearer {word}"}).status_code == 401


def test_no_spelling_of_a_path_goes_round_the_keys(stack: Any) -> None:
    for path in (
        *("//v1/models", "/v1//models", "/v1/models/", "/./v1/models", "/v1/../v1/models"),
        *("/%76%31/models", "/v1/models%00", "/v1/models;x=1", "/V1/MODELS", "/health/../v1/models"),
    ):
        # httpx would tidy the path
        with stack.http() as client:
            request = client.build_request("GET", stack.url)
            request.url = httpx.URL(stack.url).copy_with(raw_path=path.encode())
            response = client.send(request)
        assert response.status_code in (400, 401, 404), path
        assert "tiny" not in response.text


def test_debug_is_for_admins(http: httpx.Client) -> None:
    for path in ("/debug/fleet", "/debug/placements", "/debug/directory"):
        refused = http.get(path, headers={"authorization": "Bearer key-of-a"})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "not_admin"
        for key in ("boss", "bare"):
            assert http.get(path, headers={"authorization": f"Bearer {key}"}).status_code != 403


def test_a_tenant_shares_its_cache_with_itself_and_with_nobody_else(http: httpx.Client) -> None:
    prompt = "what tenant a said, at length. " * 20
    assert cached(ask(http, "key-of-a", prompt=prompt)) == 0
    assert cached(ask(http, "second-of-a", prompt=prompt)) > 0
    # nor does a salt that is made up reach it
    for salt in (None, "a", "a\0", "\0", "b\0a"):
        assert cached(ask(http, "key-of-b", prompt=prompt, cache_salt=salt)) == 0, salt
        assert cached(ask(http, "bare", prompt=prompt, cache_salt=salt)) == 0, salt


def test_who_the_body_names_does_not_matter(stack: Any, http: httpx.Client) -> None:
    headers = {"authorization": "Bearer key-of-b"}
    response = http.post("/v1/completions", json=ASK | {"user": "forged", "priority": -7}, headers=headers)
    assert response.status_code == 200
    metrics = stack.router.metrics.text()
    assert 'tenant="b"' in metrics
    assert "forged" not in metrics


def test_a_rate_is_held_and_says_when_to_come_again(http: httpx.Client) -> None:
    statuses = [ask(http, "slow").status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    refused = ask(http, "slow")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "requests_per_minute" in refused.json()["error"]["message"]
    assert 0 < int(refused.headers["retry-after"]) <= 30
    assert ask(http, "key-of-a").status_code == 200


def test_tokens_are_counted_with_those_generated(http: httpx.Client) -> None:
    assert ask(http, "thrifty", prompt="a", max_tokens=40).status_code == 200
    refused = ask(http, "thrifty", prompt="a", max_tokens=1)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 30


def test_one_at_a_time_is_one_at_a_time_and_streams_give_it_back(http: httpx.Client) -> None:
    headers = {"authorization": "Bearer narrow"}
    body = ASK | {"stream": True, "max_tokens": 1500}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        assert stream.status_code == 200
        # held on to: a reader that is gone ends the connection
        lines = stream.iter_lines()
        next(lines)
        assert ask(http, "narrow").status_code == 429
    # whoever leaves in mid-stream gives it back as well
    for _ in range(200):
        if ask(http, "narrow").status_code == 200:
            break
    else:
        pytest.fail("the place was not given back")


def test_a_key_that_is_taken_out_stops_working_without_a_restart(
    make_stack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decodefleet.cluster.access.keyring.LOOK_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("".join(to_line(key, Grant(tenant="t")) + "\n" for key in ("old", "kept")))
    stack = make_stack(workers=0, api_key_file=file)
    with stack.http() as http:

        def status(key: str) -> int:
            return http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

        assert (status("old"), status("kept"), status("new")) == (200, 200, 401)
        file.write_text("".join(to_line(key, Grant(tenant="t")) + "\n" for key in ("kept", "new")))
        assert (status("old"), status("kept"), status("new")) == (401, 200, 200)


def test_the_scheduler_learns_a_tenants_weight(stack: Any, http: httpx.Client) -> None:
    for key in ("heavy", "key-of-a"):
        assert ask(http, key).status_code == 200
    share = stack.scheduler.core.queue.share("tiny")
    assert (share.weight("heavy"), share.weight("a")) == (3.0, 1.0)


def test_answers_are_careful_with_browsers(http: httpx.Client) -> None:
    for path in ("/v1/models", "/health", "/", "/nothing/here"):
        headers = http.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "cache-control" in headers
        assert "access-control-allow-origin" not in headers
        assert headers.get("x-frame-options") == "DENY"


def test_other_sites_are_let_in_only_if_named(make_stack: Callable[..., Any]) -> None:
    stack = make_stack(workers=0, allowed_origins=("https://app.example",))
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with stack.http() as http:
        allowed = http.options("/v1/completions", headers=preflight | {"origin": "https://app.example"})
        refused = http.options("/v1/completions", headers=preflight | {"origin": "https://evil.example"})
        asked = http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in allowed.headers
    assert "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in asked.headers


def test_what_clients_send_cannot_forge_a_line_of_the_log(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    evil = "x\n2026-01-01 ERROR forged\r\n\x1b[31m"
    with caplog.at_level(logging.INFO):
        ask(http, "key-of-a", user=evil, session_id=evil, model=evil, prompt=evil)
        ask(http, "key-of-a", cache_salt="s" + evil)
        http.get("/v1/models", headers={"authorization": "Bearer key-of-a", "x-request-id": "a b\tc"})
        http.get("/v1/models/" + "forged%0aline", headers={"authorization": "Bearer key-of-a"})
    for record in caplog.records:
        assert "\n" not in record.getMessage(), record
        assert "\x1b" not in record.getMessage(), record


def test_no_key_and_no_prompt_is_logged(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="decodefleet"):
        ask(http, "key-of-a", prompt="the secret of the prompt")
        ask(http, "no-such-key-9f2c")
    text = caplog.text + json.dumps([vars(record) for record in caplog.records], default=str)
    for secret in ("key-of-a", "no-such-key-9f2c", "the secret of the prompt"):
        assert secret not in text


@pytest.mark.parametrize(
    "model", ["../../etc/passwd", "/etc/passwd", "..%2f..%2fetc%2fpasswd", "tiny/../../x", "tiny\0", "\\\\x"]
)
def test_a_model_name_is_a_name_and_no_path(http: httpx.Client, model: str) -> None:
    headers = {"authorization": "Bearer key-of-a"}
    response = ask(http, "key-of-a", model=model)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    looked = http.get(f"/v1/models/{quote(model, safe='')}", headers=headers)
    assert looked.status_code == 404
    assert "root:" not in response.text + looked.text


@pytest.mark.parametrize("name", ["..%2fapp.py", "%2e%2e/app.py", "....//app.py", "index.html%00.js"])
def test_the_page_serves_its_own_files_only(http: httpx.Client, name: str) -> None:
    assert http.get(f"/page/{name}").status_code == 404

"""`decodefleet directory` against a running server and against its Redis: both know where a prompt is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from decodefleet.cluster.cli import app
from decodefleet.cluster.debug_client import ServerUnavailable
from decodefleet.cluster.directory.holdings import Holdings
from decodefleet.cluster.directory_view import HeldNow, Question, answer
from decodefleet.cluster.embedded_redis import EmbeddedRedis

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture(scope="module")
def stack(make_stack: Callable[..., Any], server: EmbeddedRedis) -> Any:
    return make_stack(2, redis_url=server.url, blocks=512)


def ask(**question: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer(Question(**question)).as_json())
    return found


def eventually(**question: Any) -> dict[str, Any]:
    """Once a worker holds the whole prompt, as far as it consists of full blocks."""
    while True:
        found = ask(**question)
        if any(holder["prefix"]["gpu"] == found["prompt_blocks"] for holder in found["holders"]):
            return found
        time.sleep(0.05)


@pytest.mark.parametrize("chat", [True, False])
def test_server_and_redis_agree_on_a_prompt(stack: Any, server: EmbeddedRedis, chat: bool) -> None:
    with stack.http() as http:
        if chat:
            body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
            reply = http.post("/v1/chat/completions", json=body)
        else:
            reply = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
        assert reply.status_code == 200, reply.text
    told = eventually(url=stack.url, prompt=PROMPT, chat=chat)
    read = eventually(redis_url=server.url, prompt=PROMPT, chat=chat)
    assert told["prompt_tokens"] == read["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"]
    assert told["prompt_blocks"] == read["prompt_blocks"] == told["prompt_tokens"] // 16
    by_worker = [
        {holder["worker_id"]: holder["prefix"]["gpu"] for holder in found["holders"]}
        for found in (told, read)
    ]
    assert by_worker[0] == by_worker[1]
    # another tenant's salt names other blocks
    salted = ask(redis_url=server.url, prompt=PROMPT, chat=chat, cache_salt="pepper")
    assert {holder["prefix"]["gpu"] for holder in salted["holders"]} == {0}
    # what the request found when it was placed
    (decision,) = ask(url=stack.url, request_id=reply.json()["id"])
    assert len(decision["considered"]) == 2


def test_tables_are_complete(stack: Any, server: EmbeddedRedis) -> None:
    runner = CliRunner()
    for source in (["--url", stack.url], ["--redis-url", server.url]):
        for more in ([], ["--prompt", PROMPT, "--raw"]):
            shown = runner.invoke(app, ["directory", *source, *more], env={"COLUMNS": "200"})
            assert shown.exit_code == 0, shown.output
            for supervisor in stack.supervisors:
                assert supervisor.worker_id in shown.output
            assert ("full blocks" in shown.output) == bool(more)
    empty = runner.invoke(app, ["directory", "--url", stack.url, "--model", "another", "--json"])
    assert json.loads(empty.output)["holders"] == []


def test_absent_redis_is_said() -> None:
    console = Console(width=100)
    with console.capture() as shown:
        console.print(*HeldNow(Holdings(source="scheduler", holders=[], up=False)).tables())
    assert "Redis is away" in shown.get()


def test_failures_are_explained(stack: Any) -> None:
    with pytest.raises(ServerUnavailable, match="--redis-url"):
        ask(url="http://127.0.0.1:9")
    with pytest.raises(ServerUnavailable, match=r"404.*another"):
        ask(url=stack.url, model="another", prompt="x")
    with pytest.raises(ServerUnavailable, match="no placement of 'nobody'"):
        ask(url=stack.url, request_id="nobody")

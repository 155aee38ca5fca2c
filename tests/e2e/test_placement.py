"""Where requests go, over HTTP, with two workers and the directory in a real Redis."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import pytest
import redis

from decodefleet.cluster.directory.keys import PREFIX
from decodefleet.cluster.embedded_redis import EmbeddedRedis
from decodefleet.cluster.scheduling.server import SchedulerServer

BLOCK = 16
PREFIX_TOKENS = 512


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture(scope="module")
def stack(make_stack: Callable[..., Any], server: EmbeddedRedis) -> Any:
    return make_stack(2, redis_url=server.url, prefill_token_s=2e-4, blocks=2048)


@pytest.fixture
def http(stack: Any) -> Iterator[httpx.Client]:
    with stack.http() as client:
        yield client


def make_prompt(seed: int, tokens: int) -> list[int]:
    return Random(seed).choices(range(100, 4000), k=tokens)


def complete(
    http: httpx.Client, prompt: list[int], max_tokens: int = 4, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """One completion; returns the decision that placed it."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found = http.get("/debug/placements", params={"request_id": answer.json()["id"]}).json()
    (decision,) = found["data"] if isinstance(found, dict) else found
    return decision


def test_a_named_session_stays_at_its_worker(http):
    """By the header; nothing of these prompts is shared."""
    headers = {"x-session-id": "conversation-1"}
    decisions = [complete(http, make_prompt(2000 + seed, 20), headers=headers) for seed in range(8)]
    assert len({decision["worker_id"] for decision in decisions}) == 1
    refused = http.post("/v1/completions", json={"prompt": [1]}, headers={"x-session-id": "x" * 257})
    assert refused.status_code == 400
    assert "x-session-id" in refused.text


def test_unlike_requests_spread(http):
    prompts = [make_prompt(seed, 100) for seed in range(64)]
    with ThreadPoolExecutor(64) as pool:
        decisions = list(pool.map(lambda prompt: complete(http, prompt, 32), prompts))
    workers = Counter(decision["worker_id"] for decision in decisions)
    assert len(workers) == 2
    assert max(workers.values()) <= 1.5 * min(workers.values())
    for decision in decisions:
        for candidate in decision["considered"]:
            cost = candidate["cost_s"]
            assert cost["total"] == pytest.approx(
                sum(seconds for term, seconds in cost.items() if term != "total")
            )


def test_shared_prefix_goes_to_its_holder(http, stack, server):
    prefix = make_prompt(1000, PREFIX_TOKENS)
    decisions = [complete(http, prefix + make_prompt(1001 + number, 40)) for number in range(40)]
    workers = Counter(decision["worker_id"] for decision in decisions)
    assert max(workers.values()) >= 38
    assert all(decision["hit_tokens"] >= PREFIX_TOKENS for decision in decisions[1:])
    # it is really in Redis, and came back from there
    client = redis.Redis.from_url(server.url)
    keys = client.keys(f"{PREFIX}tiny:blocks:*")
    client.close()
    assert len(keys) == 2
    assert len(stack.scheduler.core.index) > PREFIX_TOKENS // BLOCK


def test_burst_that_just_ended_moves_no_prefix(http):
    """Reports from within the burst arrive after its end."""
    prefix = make_prompt(5000, PREFIX_TOKENS)
    holder = complete(http, prefix + make_prompt(5001, 40))["worker_id"]
    prompts = [make_prompt(5100 + number, 100) for number in range(64)]
    with ThreadPoolExecutor(64) as pool:
        list(pool.map(lambda prompt: complete(http, prompt, 32), prompts))
    after = [complete(http, prefix + make_prompt(5200 + number, 40)) for number in range(20)]
    assert sum(decision["worker_id"] == holder for decision in after) >= 19


def test_holder_with_a_long_queue_is_left(http, stack):
    prefix = make_prompt(2000, PREFIX_TOKENS)
    holder = complete(http, prefix + make_prompt(2001, 20))["worker_id"]
    # sent at once, each waits for what is queued before it: more than one prefix's worth goes elsewhere
    with ThreadPoolExecutor(32) as pool:
        prompts = [prefix + make_prompt(2100 + number, 500) for number in range(32)]
        decisions = list(pool.map(lambda prompt: complete(http, prompt), prompts))
    workers = Counter(decision["worker_id"] for decision in decisions)
    assert len(workers) == 2
    for decision in decisions:
        costs = {each["worker_id"]: each["cost_s"]["total"] for each in decision["considered"]}
        assert costs[decision["worker_id"]] == min(costs.values())
        if decision["worker_id"] != holder:
            # equal costs are told apart at random
            assert costs[holder] >= costs[decision["worker_id"]]


def test_redis_killed_costs_hits_only(http, server):
    prompt = make_prompt(3000, 200)
    first = complete(http, prompt)
    os.kill(server.pid, signal.SIGKILL)
    assert [complete(http, make_prompt(3001 + number, 50))["refused"] for number in range(20)] == [None] * 20
    # the scheduler's own memory of what went where
    again = complete(http, prompt)
    assert (again["worker_id"], again["hit_tokens"] >= 176) == (first["worker_id"], True)


def test_another_scheduler_takes_over(make_stack):
    """It knows nothing at first; workers and routers find it, and it never uses an older epoch."""
    stack = make_stack(2)
    old = stack.scheduler

    async def replace() -> None:
        await old.stop()
        stack.scheduler = SchedulerServer()
        await stack.scheduler.start()

    with stack.http() as http:
        complete(http, make_prompt(4000, 50))
        stack.call(replace)
        assert stack.scheduler.epoch > old.epoch
        while len(stack.scheduler.core.fleet) < 2 or http.get("/ready").status_code != 200:
            time.sleep(0.05)
        decisions = [complete(http, make_prompt(4001 + number, 50)) for number in range(8)]
    assert {each["refused"] for each in decisions} == {None}
    assert not old.core.log.explain(decisions[0]["request_id"])

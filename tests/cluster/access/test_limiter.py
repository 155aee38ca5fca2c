"""Limits of tenants: the arithmetic, the same in Redis's script, several routers, and Redis away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodefleet.cluster.access import buckets
from decodefleet.cluster.access import limiter as limits
from decodefleet.cluster.access.keys import Grant
from decodefleet.cluster.access.limiter import Limiter, LimitReached
from decodefleet.cluster.access.salt import cache_salt
from decodefleet.cluster.directory import connection
from decodefleet.cluster.directory.connection import Client, connect, hang_up
from decodefleet.cluster.embedded_redis import EmbeddedRedis


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.floats(0.1, 1e6), st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e4)), max_size=30))
def test_no_more_is_given_than_the_rate_allows(rate: float, steps: list[tuple[float, float]]) -> None:
    bucket, begun, got, last = buckets.full(rate, 0.0), 0.0, 0.0, 0.0
    for pause, amount in steps:
        begun += pause
        bucket = buckets.filled(bucket, rate, begun)
        assert bucket.level <= rate
        if buckets.wait_s(bucket, rate, 1.0) == 0:
            bucket = buckets.taken(bucket, amount)
            got, last = got + amount, amount
    # a bucket's worth at the start, what came since, and the debt of the last one
    assert got <= rate + begun * rate / 60 + last + 1e-6 * (1 + got)


@given(st.floats(0.1, 1e6), st.floats(0, 1e6), st.floats(0, 1e5))
def test_after_the_wait_there_is_enough(rate: float, debt: float, needed: float) -> None:
    bucket = buckets.taken(buckets.full(rate, 0.0), debt)
    wait = buckets.wait_s(bucket, rate, needed)
    later = buckets.filled(bucket, rate, wait)
    assert later.level >= min(needed, rate) - 1e-6 * (rate + debt)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    server = EmbeddedRedis()
    yield server.start()
    server.stop()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Client]:
    client = connect(redis_url)
    await client.flushall()
    yield client
    await hang_up(client)


@pytest.fixture(params=["alone", "redis"])
def limiter(request: pytest.FixtureRequest) -> Limiter:
    return Limiter(request.getfixturevalue("redis") if request.param == "redis" else None)


async def refusal(limiter: Limiter, grant: Grant, tokens: int = 1) -> LimitReached | None:
    try:
        admitted = await limiter.admit(grant, tokens)
    except LimitReached as reached:
        return reached
    admitted.close(0)
    return None


async def test_requests_beyond_the_rate_are_refused_with_the_time_to_wait(limiter: Limiter) -> None:
    grant = Grant(tenant="a", requests_per_minute=3)
    assert [await refusal(limiter, grant) for _ in range(3)] == [None] * 3
    reached = await refusal(limiter, grant)
    assert reached is not None
    assert reached.limit == "requests_per_minute"
    assert 0 < reached.retry_after_s <= 20
    # others are not touched
    assert await refusal(limiter, Grant(tenant="b", requests_per_minute=3)) is None


async def test_outputs_are_paid_for_afterwards(limiter: Limiter) -> None:
    grant = Grant(tenant="a", tokens_per_minute=100)
    admitted = await limiter.admit(grant, 30)
    admitted.close(270)
    admitted.close(1_000_000)
    await asyncio.gather(*limiter._payments)
    reached = await refusal(limiter, grant)
    assert reached is not None
    assert reached.limit == "tokens_per_minute"
    # 200 in debt, and one token more
    assert 110 < reached.retry_after_s <= 121


async def test_a_refused_request_takes_nothing_of_the_other_limit(limiter: Limiter) -> None:
    grant = Grant(tenant="a", requests_per_minute=1000, tokens_per_minute=10)
    assert await refusal(limiter, grant, 500) is None
    for _ in range(5):
        reached = await refusal(limiter, grant, 1)
        assert reached is not None
        assert reached.limit == "tokens_per_minute"
    only_requests = grant.model_copy(update={"tokens_per_minute": None})
    assert [await refusal(limiter, only_requests) for _ in range(995)] == [None] * 995


async def test_routers_share_their_buckets(redis: Client) -> None:
    grant = Grant(tenant="a", requests_per_minute=4)
    routers = [Limiter(redis), Limiter(redis)]
    got = [await refusal(routers[number % 2], grant) for number in range(6)]
    assert [found is None for found in got] == [True] * 4 + [False] * 2


async def test_buckets_leave_redis_when_they_are_full_again(redis: Client) -> None:
    limiter = Limiter(redis)
    await refusal(limiter, Grant(tenant="a", requests_per_minute=600), 1)
    (key,) = await redis.keys("*")
    assert 0 < await redis.pttl(key) <= 1200


async def test_without_redis_each_router_goes_by_buckets_of_its_own() -> None:
    clock = Clock()
    away = connect("redis://127.0.0.1:9")
    limiter = Limiter(away, clock=clock)
    grant = Grant(tenant="a", requests_per_minute=2)
    got = [await refusal(limiter, grant) for _ in range(3)]
    assert [found is None for found in got] == [True, True, False]
    clock.now += 30
    assert await refusal(limiter, grant) is None
    await hang_up(away)


async def test_a_redis_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen, it still accepts connections: what bounds the wait is nobody's but ours."""
    monkeypatch.setattr(connection, "_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(limits, "ANSWER_S", 0.05)
    clock = Clock()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        redis = connect(f"redis://127.0.0.1:{mute.getsockname()[1]}")
        held = Limiter(redis, clock=clock)
        grant = Grant(tenant="a", requests_per_minute=2)
        assert [await refusal(held, grant) is None for _ in range(3)] == [True, True, False]
        # once it rests, nobody asks it
        monkeypatch.setattr(limits, "ANSWER_S", 3600.0)
        clock.now += 1
        assert await refusal(held, grant) is not None
        await hang_up(redis)


async def test_what_runs_at_once_is_bounded_and_given_back(limiter: Limiter) -> None:
    grant = Grant(tenant="a", max_concurrent=2)
    first, second = await limiter.admit(grant, 1), await limiter.admit(grant, 1)
    reached = await refusal(limiter, grant)
    assert reached is not None
    assert reached.limit == "max_concurrent"
    first.close(5)
    first.close(5)
    third = await limiter.admit(grant, 1)
    assert await refusal(limiter, grant) is not None
    second.close(0)
    third.close(0)
    assert not limiter._running


async def test_a_request_that_is_refused_does_not_stay_counted(limiter: Limiter) -> None:
    grant = Grant(tenant="a", max_concurrent=1, requests_per_minute=1)
    assert await refusal(limiter, grant) is None
    for _ in range(3):
        reached = await refusal(limiter, grant)
        assert reached is not None
        assert reached.limit == "requests_per_minute"
    assert not limiter._running


async def test_without_limits_nothing_is_asked_of_redis() -> None:
    assert await refusal(Limiter(connect("redis://127.0.0.1:9")), Grant(tenant="a")) is None


@given(st.text(), st.text(), st.text("abc.-_", min_size=1), st.text("abc.-_", min_size=1))
def test_salts_of_two_tenants_never_meet(one: str, two: str, first: str, second: str) -> None:
    if (first, one) != (second, two):
        assert cache_salt(first, one) != cache_salt(second, two)
    assert cache_salt("", one) == one


async def test_routers_share_what_may_run_at_once() -> None:
    routers = 1
    limiter, grant = Limiter(routers=lambda: routers), Grant(tenant="a", max_concurrent=3)
    running = [await limiter.admit(grant, 1) for _ in range(2)]
    routers = 2
    with pytest.raises(LimitReached, match="max_concurrent"):
        await limiter.admit(grant, 1)
    running.pop().close(0)
    await limiter.admit(grant, 1)

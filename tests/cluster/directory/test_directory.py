"""Publisher and reader against a real Redis, which may go away."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator

import pytest
import redis as redis_client
from waiting import eventually

from decodefleet.cluster.directory import connection
from decodefleet.cluster.directory.keys import Holder, Keys
from decodefleet.cluster.directory.publisher import CHUNK, MAX_DELTA_BYTES, DirectoryPublisher
from decodefleet.cluster.directory.reader import DirectoryReader
from decodefleet.cluster.embedded_redis import EmbeddedRedis, RedisUnavailable, check_redis
from decodefleet.cluster.processes import free_ports
from decodefleet.worker.protocol import KvEvents

MODEL = "org/a model*"
# takes in about a millisecond
SPAN_TOLD = 8192


class Held:
    """A listener that keeps what workers hold."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, str], dict[str, set[bytes]]] = {}
        self.cleared = 0

    def on_stored(self, worker_id, incarnation, hashes, tier) -> None:
        tiers = self.blocks.setdefault((worker_id, incarnation), defaultdict(set))
        tiers[tier].update(hashes)

    def on_removed(self, worker_id, incarnation, hashes, tier) -> None:
        self.blocks[worker_id, incarnation][tier].difference_update(hashes)

    def on_cleared(self, worker_id, incarnation) -> None:
        self.cleared += 1
        self.blocks.pop((worker_id, incarnation), None)

    def of(self, worker_id: str, incarnation: str = "one", tier: str = "gpu") -> set[bytes]:
        return set(self.blocks.get((worker_id, incarnation), {}).get(tier, ()))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture
def client(server) -> Iterator[redis_client.Redis]:
    connection = redis_client.Redis.from_url(server.url)
    connection.flushall()
    yield connection
    connection.close()


def make_hashes(first: int, last: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(first, last)]


def make_events(seq: int, stored=(), removed=(), **options) -> KvEvents:
    return KvEvents(seq=seq, stored=b"".join(stored), removed=b"".join(removed), **options)


@contextlib.asynccontextmanager
async def running(part, *arguments) -> AsyncIterator:
    await part.start(*arguments)
    try:
        yield part
    finally:
        await part.stop()


def make_publisher(server, worker_id="w", incarnation="one", **options) -> DirectoryPublisher:
    return DirectoryPublisher(server.url, MODEL, worker_id, incarnation, **options)


def make_reader(server) -> DirectoryReader:
    return DirectoryReader(server.url, MODEL, refresh_s=0.05)


async def test_news_travel(server, client):
    held = Held()
    async with running(make_publisher(server)) as publisher, running(make_reader(server), held) as reader:
        publisher.publish(make_events(1, make_hashes(0, 10)))
        await eventually(lambda: held.of("w") == set(make_hashes(0, 10)))
        publisher.publish(make_events(2, make_hashes(10, 12), make_hashes(0, 5)))
        publisher.publish(make_events(3, make_hashes(11, 14), tier="cpu"))
        await eventually(lambda: held.of("w") == set(make_hashes(5, 12)))
        await eventually(lambda: held.of("w", tier="cpu") == set(make_hashes(11, 14)))
        publisher.publish(make_events(4, removed=make_hashes(11, 12)))
        publisher.publish(make_events(5, removed=make_hashes(12, 13), tier="cpu"))
        await eventually(lambda: held.of("w", tier="cpu") == {make_hashes(11, 12)[0], make_hashes(13, 14)[0]})
        assert held.of("w") == set(make_hashes(5, 11))
        publisher.publish(make_events(6, make_hashes(50, 51), cleared=True))
        await eventually(lambda: held.of("w") == set(make_hashes(50, 51)))
        assert held.of("w", tier="cpu") == set()
        assert publisher.held == 1
        assert publisher.connected
        assert reader.connected
        assert reader.gaps == 0


async def test_schema(server, client):
    keys, holder = Keys(MODEL), Holder("w", "one")
    async with running(make_publisher(server, lease_s=60, about={"root": b"r"})) as publisher:
        publisher.publish(make_events(1, make_hashes(0, 2)))
        publisher.publish(make_events(2, make_hashes(1, 2), tier="nvme"))
        await eventually(lambda: client.get(keys.tiers(holder)) == bytes((0b001, 0b101)))
        assert client.get(keys.blocks(holder)) == b"".join(make_hashes(0, 2))
        about = client.hgetall(keys.about(holder))
        assert {b"gpu": b"2", b"cpu": b"0", b"nvme": b"1", b"root": b"r"}.items() <= about.items()
        assert client.smembers(keys.workers) == {b"w|one"}
        await eventually(lambda: client.exists(keys.deltas(holder)))
        for key in keys.leased(holder):
            assert 0 < client.pttl(key) <= 60_000
        # a slot that came free is used again
        publisher.publish(make_events(3, removed=make_hashes(0, 1)))
        await eventually(lambda: client.get(keys.tiers(holder)) == bytes((0, 0b101)))
        publisher.publish(make_events(4, make_hashes(7, 8)))
        await eventually(
            lambda: client.get(keys.blocks(holder)) == make_hashes(7, 8)[0] + make_hashes(1, 2)[0]
        )
    # a clean stop leaves nothing
    assert client.keys("decodefleet:*") == []


async def test_reader_that_comes_late_knows_all(server, client):
    held = Held()
    blocks = make_hashes(0, 20 * CHUNK + 7)
    async with running(make_publisher(server)) as publisher:
        publisher.publish(make_events(1, blocks))
        await eventually(lambda: client.strlen(Keys(MODEL).tiers(Holder("w", "one"))) == len(blocks))
        async with running(make_reader(server), held):
            await eventually(lambda: len(held.of("w")) == len(blocks))
            publisher.publish(make_events(2, removed=blocks[:100]))
            await eventually(lambda: held.of("w") == set(blocks[100:]))


async def test_lost_deltas_are_noticed(server, client):
    keys, holder, held = Keys(MODEL), Holder("w", "one"), Held()
    async with running(make_publisher(server)) as publisher, running(make_reader(server), held) as reader:
        publisher.publish(make_events(1, make_hashes(0, 3)))
        await eventually(lambda: len(held.of("w")) == 3)
        # two changes of which the stream keeps the second only
        seq = int(client.hget(keys.about(holder), "seq"))
        client.append(keys.blocks(holder), make_hashes(7, 8)[0])
        client.append(keys.tiers(holder), b"\1")
        client.xadd(keys.deltas(holder), {"seq": seq + 2, "1": make_hashes(8, 9)[0]})
        await eventually(lambda: make_hashes(7, 8)[0] in held.of("w"))
        assert reader.gaps == 1


async def test_deltas_are_bounded(server, client):
    """A worker that changes much leaves no more of it in Redis than a reader may be behind."""
    keys, holder, held = Keys(MODEL), Holder("w", "one"), Held()
    blocks = make_hashes(0, 4 * MAX_DELTA_BYTES // 16)
    async with running(make_publisher(server)) as publisher:
        await eventually(lambda: publisher.connected)
        for first in range(0, len(blocks), CHUNK):
            publisher.publish(make_events(1 + first // CHUNK, blocks[first : first + CHUNK]))
            await eventually(lambda: not publisher._slots.touched)
        assert client.memory_usage(keys.deltas(holder), samples=0) < 2 * MAX_DELTA_BYTES
        assert client.xlen(keys.deltas(holder)) > 10
        async with running(make_reader(server), held):
            await eventually(lambda: len(held.of("w")) == len(blocks))


async def test_lost_events_make_the_publisher_forget(server, client):
    held = Held()
    async with running(make_publisher(server)) as publisher, running(make_reader(server), held):
        publisher.publish(make_events(1, make_hashes(0, 3)))
        await eventually(lambda: len(held.of("w")) == 3)
        publisher.publish(make_events(3, make_hashes(5, 6)))
        await eventually(lambda: held.of("w") == set(make_hashes(5, 6)))


PUBLISHER = """
import asyncio, sys
from decodefleet.cluster.directory.publisher import DirectoryPublisher
from decodefleet.worker.protocol import KvEvents

async def main():
    publisher = DirectoryPublisher(sys.argv[1], sys.argv[2], "w", "one", lease_s=0.5)
    await publisher.start()
    publisher.publish(KvEvents(seq=1, stored=bytes(48)))
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_lease_is_renewed_and_expires_with_its_owner(server, client):
    held = Held()
    async with running(make_reader(server), held):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", PUBLISHER, server.url, MODEL)
        try:
            await eventually(lambda: held.of("w") == {bytes(16)})
            # longer than the lease
            await asyncio.sleep(0.8)
            assert held.of("w") == {bytes(16)}
        finally:
            process.kill()
            await process.wait()
        await eventually(lambda: not held.blocks)
        await eventually(lambda: client.keys("decodefleet:*") == [])


async def test_incarnations_are_kept_apart(server, client):
    held = Held()
    old, new = make_publisher(server, incarnation="one"), make_publisher(server, incarnation="two")
    async with running(make_reader(server), held), running(old), running(new):
        old.publish(make_events(1, make_hashes(0, 3)))
        new.publish(make_events(1, make_hashes(5, 6)))
        await eventually(lambda: len(held.of("w", "one")) == 3 and len(held.of("w", "two")) == 1)
        await old.stop()
        await eventually(lambda: ("w", "one") not in held.blocks)
        assert held.of("w", "two") == set(make_hashes(5, 6))


async def test_models_are_kept_apart(server, client):
    held = Held()
    other = DirectoryPublisher(server.url, "another", "w", "one")
    async with (
        running(make_reader(server), held),
        running(other),
        running(make_publisher(server)) as publisher,
    ):
        other.publish(make_events(1, make_hashes(0, 3)))
        publisher.publish(make_events(1, make_hashes(5, 6)))
        await eventually(lambda: held.of("w") == set(make_hashes(5, 6)))


async def test_redis_killed_and_back():
    held = Held()
    with EmbeddedRedis() as server:
        async with running(make_publisher(server)) as publisher, running(make_reader(server), held) as reader:
            publisher.publish(make_events(1, make_hashes(0, 2000)))
            await eventually(lambda: len(held.of("w")) == 2000)
            os.kill(server.pid, signal.SIGKILL)
            await eventually(lambda: not reader.connected)
            # what was known stays known while Redis is away, and nothing blocks or raises
            assert len(held.of("w")) == 2000
            publisher.publish(make_events(2, make_hashes(2000, 2001), make_hashes(0, 1000)))
            await eventually(lambda: reader.connected and held.of("w") == set(make_hashes(1000, 2001)))


async def test_redis_frozen_and_thawed(monkeypatch):
    """It still accepts connections, and answers nothing."""
    monkeypatch.setattr(connection, "_TIMEOUT_S", 0.2)
    held = Held()
    with EmbeddedRedis() as server:
        async with (
            running(make_publisher(server, lease_s=0.6)) as publisher,
            running(make_reader(server), held) as reader,
        ):
            publisher.publish(make_events(1, make_hashes(0, 3)))
            await eventually(lambda: len(held.of("w")) == 3)
            os.kill(server.pid, signal.SIGSTOP)
            await eventually(lambda: not reader.connected and not publisher.connected)
            publisher.publish(make_events(2, make_hashes(3, 4)))
            assert len(held.of("w")) == 3
            os.kill(server.pid, signal.SIGCONT)
            await eventually(lambda: reader.connected and held.of("w") == set(make_hashes(0, 4)))


async def test_what_makes_no_sense_ends_no_reader(server, client):
    keys, holder, held = Keys(MODEL), Holder("w", "one"), Held()
    async with running(make_publisher(server)) as publisher, running(make_reader(server), held) as reader:
        publisher.publish(make_events(1, make_hashes(0, 3)))
        await eventually(lambda: len(held.of("w")) == 3)
        client.xadd(keys.deltas(holder), {"of": "another program"})
        await eventually(lambda: not reader.connected)
        publisher.publish(make_events(2, make_hashes(3, 4)))
        await eventually(lambda: reader.connected and held.of("w") == set(make_hashes(0, 4)))


async def test_no_more_is_told_at_once_than_the_event_loop_can_spare(server, client):
    """Placements and life signs wait for as long as the listener takes one piece in."""
    told = []

    class Listener(Held):
        def on_stored(self, worker_id, incarnation, hashes, tier) -> None:
            told.append(len(hashes))
            super().on_stored(worker_id, incarnation, hashes, tier)

    held, blocks = Listener(), make_hashes(0, 40_000)
    async with running(make_publisher(server)) as publisher:
        publisher.publish(make_events(1, blocks))
        await eventually(lambda: client.strlen(Keys(MODEL).tiers(Holder("w", "one"))) == len(blocks))
        async with running(make_reader(server), held):
            await eventually(lambda: len(held.of("w")) == len(blocks))
    assert max(told) <= SPAN_TOLD


async def test_redis_that_forgets_is_told_again(server, client):
    held = Held()
    async with (
        running(make_publisher(server, lease_s=0.3)) as publisher,
        running(make_reader(server), held),
    ):
        publisher.publish(make_events(1, make_hashes(0, 3)))
        await eventually(lambda: len(held.of("w")) == 3)
        client.flushall()
        await eventually(lambda: held.cleared > 1 and len(held.of("w")) == 3)
        client.flushall()
        publisher.publish(make_events(2, make_hashes(3, 4)))
        await eventually(lambda: held.of("w") == set(make_hashes(0, 4)))


async def test_redis_that_never_was_harms_nobody():
    url = "unix:///nowhere/s"
    publisher, reader = DirectoryPublisher(url, MODEL, "w", "one"), DirectoryReader(url, MODEL)
    async with running(publisher), running(reader, Held()):
        for seq in range(1, 200):
            publisher.publish(make_events(seq, make_hashes(seq, seq + 10), make_hashes(seq - 1, seq)))
        await asyncio.sleep(0.05)
        assert publisher.held == 10
        # bounded by what is held, not by what happened
        assert not publisher._slots.touched
        assert publisher._slots.size < 20
        assert not publisher.connected
        assert not reader.connected


async def test_stop_without_start():
    await DirectoryPublisher("unix:///nowhere/s", MODEL, "w", "one").stop()
    await DirectoryReader("unix:///nowhere/s", MODEL).stop()


@pytest.mark.parametrize("form", ["redis://:{}@127.0.0.1:{}/0", "unix://:{}@{}"])
async def test_password(form):
    held = Held()
    with EmbeddedRedis() as server:
        admin = redis_client.Redis.from_url(server.url)
        (port,) = free_ports(1)
        admin.config_set("port", port)
        admin.config_set("requirepass", "secret")
        admin.close()
        address = port if form.startswith("redis") else server.url.removeprefix("unix://")
        url = form.format("secret", address)
        check_redis(url)
        with pytest.raises(RedisUnavailable):
            check_redis(form.format("wrong", address))
        publisher = DirectoryPublisher(url, MODEL, "w", "one")
        async with running(publisher), running(DirectoryReader(url, MODEL, refresh_s=0.05), held):
            publisher.publish(make_events(1, make_hashes(0, 3)))
            await eventually(lambda: len(held.of("w")) == 3)

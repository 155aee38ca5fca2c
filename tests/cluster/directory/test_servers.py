"""The directory on the kinds of Redis that people run: versions, TLS, passwords, replicas, Sentinels.

What the embedded server does is in `test_directory.py`; here are others, and what operators do to them.
"""

import asyncio
import contextlib

import pytest
import redis as redis_client
from certificates import make_certificate
from waiting import eventually

from decodefleet.cluster.directory.publisher import DirectoryPublisher
from decodefleet.cluster.directory.reader import DirectoryReader
from decodefleet.cluster.embedded_redis import RedisUnavailable, check_redis
from decodefleet.cluster.processes import free_ports
from decodefleet.worker.protocol import KvEvents
from tests.support.redis_servers import (
    BINARIES,
    EMBEDDED,
    run_redis,
    run_sentinel,
    tls_in_front_of,
)

MODEL, SERVICE = "m", "main"


class Held:
    """A listener that keeps what one worker holds in its GPU."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()

    def on_stored(self, worker_id, incarnation, hashes, tier) -> None:
        self.blocks.update(hashes)

    def on_removed(self, worker_id, incarnation, hashes, tier) -> None:
        self.blocks.difference_update(hashes)

    def on_cleared(self, worker_id, incarnation) -> None:
        self.blocks.clear()


def make_hashes(first: int, last: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(first, last)]


def make_events(seq: int, stored=(), removed=()) -> KvEvents:
    return KvEvents(seq=seq, stored=b"".join(stored), removed=b"".join(removed))


@contextlib.asynccontextmanager
async def running(url: str, read_url: str | None = None, lease_s: float = 1.0):
    """(publisher, reader, what the reader was told)."""
    publisher = DirectoryPublisher(url, MODEL, "w", "one", lease_s)
    reader, held = DirectoryReader(read_url or url, MODEL, refresh_s=0.05), Held()
    await publisher.start()
    await reader.start(held)
    try:
        yield publisher, reader, held
    finally:
        await publisher.stop()
        await reader.stop()


async def exchange(publisher: DirectoryPublisher, held: Held) -> None:
    publisher.publish(make_events(1, make_hashes(0, 3000)))
    await eventually(lambda: len(held.blocks) == 3000)
    publisher.publish(make_events(2, make_hashes(3000, 3001), make_hashes(0, 2999)))
    await eventually(lambda: held.blocks == set(make_hashes(2999, 3001)))


@pytest.mark.parametrize("binary", BINARIES)
async def test_every_version(binary, tmp_path):
    (port,) = free_ports(1)
    with run_redis(tmp_path, port, binary=binary), redis_client.Redis(port=port) as admin:
        async with running(f"redis://127.0.0.1:{port}") as (publisher, _, held):
            await exchange(publisher, held)
            # there are none of ours, so nothing is missed
            admin.script_flush()
            admin.flushall()
            publisher.publish(make_events(3, make_hashes(5, 6)))
            await eventually(lambda: held.blocks == {*make_hashes(5, 6), *make_hashes(2999, 3001)})
        assert admin.keys() == []


async def test_tls_and_password(tmp_path):
    certificate, key = make_certificate(tmp_path)
    (port,) = free_ports(1)
    with run_redis(tmp_path, port, "--requirepass", "secret"):
        async with tls_in_front_of(port, certificate, key) as secure:
            address = f"127.0.0.1:{secure}"
            url = f"rediss://:secret@{address}?ssl_ca_certs={certificate}"
            await asyncio.to_thread(check_redis, url)
            async with running(url) as (publisher, _, held):
                await exchange(publisher, held)
            for wrong in (
                f"rediss://:secret@{address}",
                f"redis://:secret@{address}",
                f"rediss://:no@{address}?ssl_ca_certs={certificate}",
            ):
                with pytest.raises(RedisUnavailable) as refused:
                    await asyncio.to_thread(check_redis, wrong)
                assert "secret" not in str(refused.value)


async def test_replica_is_read_from_and_not_written_to(tmp_path):
    master, replica = free_ports(2)
    with (
        run_redis(tmp_path, master, "--repl-diskless-sync-delay", "0"),
        run_redis(tmp_path, replica, "--replicaof", "127.0.0.1", str(master)),
        redis_client.Redis(port=replica) as admin,
    ):
        await eventually(lambda: admin.info("replication")["master_link_status"] == "up")
        async with running(f"redis://127.0.0.1:{master}", f"redis://127.0.0.1:{replica}") as (
            publisher,
            _,
            held,
        ):
            await exchange(publisher, held)
            lost = DirectoryPublisher(f"redis://127.0.0.1:{replica}", MODEL, "x", "one")
            await lost.start()
            lost.publish(make_events(1, make_hashes(0, 1)))
            await eventually(lambda: lost._absence_noted)
            assert not lost.connected
            # it becomes a master, and is one as soon as it is tried again
            admin.replicaof("no", "one")
            await eventually(lambda: lost.connected)
            await lost.stop()


async def test_full_server_is_left_to_others(tmp_path):
    """Writes fail for want of memory: the entry goes rather than being half true."""
    (port,) = free_ports(1)
    with (
        run_redis(tmp_path, port, "--maxmemory-policy", "noeviction"),
        redis_client.Redis(port=port) as admin,
    ):
        async with running(f"redis://127.0.0.1:{port}") as (publisher, _, held):
            publisher.publish(make_events(1, make_hashes(0, 10)))
            await eventually(lambda: len(held.blocks) == 10)
            admin.config_set("maxmemory", "100kb")
            publisher.publish(make_events(2, make_hashes(10, 20)))
            await eventually(lambda: not held.blocks)
            assert not publisher.connected
            assert publisher.held == 20
            assert admin.keys() == []


async def test_evicted_keys_are_written_again(tmp_path):
    """A server that was set up as a cache takes keys away one by one."""
    (port,) = free_ports(1)
    with run_redis(tmp_path, port), redis_client.Redis(port=port) as admin:
        async with running(f"redis://127.0.0.1:{port}", lease_s=0.3) as (publisher, _, held):
            publisher.publish(make_events(1, make_hashes(0, 10)))
            await eventually(lambda: len(held.blocks) == 10)
            for name in ("about", "blocks", "tiers"):
                held.blocks.clear()
                admin.delete(*admin.keys(f"*:{name}:*"))
                await eventually(lambda: len(held.blocks) == 10)
            admin.delete(*admin.keys("*:deltas:*"))
            publisher.publish(make_events(2, make_hashes(10, 11)))
            await eventually(lambda: held.blocks == set(make_hashes(0, 11)))


async def test_failover_by_sentinels(tmp_path):
    first, second, *watchers = free_ports(5)
    replica = ("--replicaof", "127.0.0.1", str(first), "--repl-diskless-sync-delay", "0")
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(run_redis(tmp_path, first))
        stack.enter_context(run_redis(tmp_path, second, *replica))
        admin = stack.enter_context(redis_client.Redis(port=second))
        await eventually(lambda: admin.info("replication")["master_link_status"] == "up")
        for port in watchers:
            stack.enter_context(run_sentinel(tmp_path, port, SERVICE, first))
        await _until_sentinels_agree(watchers)
        hosts = ",".join(f"127.0.0.1:{port}" for port in watchers)
        url = f"redis+sentinel://{hosts}/{SERVICE}"
        await asyncio.to_thread(check_redis, url)
        async with running(url) as (publisher, reader, held):
            await exchange(publisher, held)
            master.kill()
            await eventually(lambda: not reader.connected)
            publisher.publish(make_events(3, make_hashes(5, 6)))
            await eventually(lambda: admin.role()[0] == b"master")
            await eventually(lambda: reader.connected and publisher.connected)
            await eventually(lambda: held.blocks == {*make_hashes(5, 6), *make_hashes(2999, 3001)})


async def _until_sentinels_agree(watchers: list[int]) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(redis_client.Redis(port=port)) for port in watchers]

        def settled() -> bool:
            states = [client.sentinel_master(SERVICE) for client in clients]
            return all(
                state["num-other-sentinels"] == len(watchers) - 1 and state["num-slaves"] == 1
                for state in states
            )

        await eventually(settled)


def test_embedded_binary_is_among_those_tested():
    assert EMBEDDED in BINARIES

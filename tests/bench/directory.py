"""The prefix directory with many entries: publish rate, rebuild time, bytes per entry, and churn.

    python tests/bench/directory.py [--entries 10000000] [--workers 64] [--redis-server PATH]

Starts a Redis of its own (the embedded one, or PATH) and a publisher per worker, each with its share of the
entries, a third of them in two tiers. A reader that knows nothing then reads all; each publisher replaces
some of its entries while the reader follows; last, Redis is emptied and told everything again. Everything but
Redis runs in one thread. Prints one line of JSON. 10 million entries take 2 to 3 GiB, mostly of publishers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from decodefleet.cluster.directory.publisher import DirectoryPublisher
from decodefleet.cluster.directory.reader import DirectoryReader
from decodefleet.cluster.processes import free_ports
from decodefleet.worker.protocol import KvEvents, Tier
from tests.support.redis_servers import EMBEDDED, run_redis

# hashes of one message of a worker
MESSAGE = 4096
MODEL = "m"


class Count:
    """A listener that counts what it is told of GPUs."""

    def __init__(self) -> None:
        self.stored = self.removed = 0

    def on_stored(self, worker_id: str, incarnation: str, hashes: list[bytes], tier: Tier) -> None:
        self.stored += len(hashes) * (tier == "gpu")

    def on_removed(self, worker_id: str, incarnation: str, hashes: list[bytes], tier: Tier) -> None:
        self.removed += len(hashes) * (tier == "gpu")

    def on_cleared(self, worker_id: str, incarnation: str) -> None:
        return


class Worker:
    """Publishes made-up blocks."""

    def __init__(self, url: str, number: int, entries: int) -> None:
        self.publisher = DirectoryPublisher(url, MODEL, f"worker-{number}", "one", lease_s=60)
        self._rng = random.Random(number)
        self._left = entries
        self._seq = 0
        self._newest = b""

    def fill(self) -> bool:
        """One message of new blocks; False once there are as many as there should be."""
        count = min(MESSAGE, self._left)
        if not count:
            return False
        self._left -= count
        self._newest = self._rng.randbytes(16 * count)
        self._tell(stored=self._newest)
        self._tell(stored=self._newest[: 16 * (count // 3)], tier="cpu")
        return True

    def replace(self, count: int) -> int:
        """New blocks for the newest ones; returns how many."""
        gone = self._newest[: 16 * count]
        self._newest = self._rng.randbytes(len(gone))
        self._tell(stored=self._newest, removed=gone)
        return len(gone) // 16

    def _tell(self, **events: Any) -> None:
        self._seq += 1
        self.publisher.publish(KvEvents(seq=self._seq, **events))


async def until(condition: Callable[[], bool]) -> float:
    """Seconds until it holds."""
    began = time.perf_counter()
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return time.perf_counter() - began


async def fill(workers: list[Worker]) -> float:
    began = time.perf_counter()
    while sum(worker.fill() for worker in workers):
        # a worker tells no faster than this
        await until(lambda: all(len(each.publisher._slots.touched) < 4 * MESSAGE for each in workers))
    await until(lambda: not any(each.publisher._slots.touched for each in workers))
    return time.perf_counter() - began


async def measure(url: str, admin: redis.Redis, entries: int, count: int, churn: int) -> dict[str, Any]:
    workers = [Worker(url, number, entries // count) for number in range(count)]
    entries = entries // count * count
    empty = admin.info("memory")["used_memory"]
    for worker in workers:
        await worker.publisher.start()
    await until(lambda: all(worker.publisher.connected for worker in workers))
    filled_s = await fill(workers)
    memory = admin.info("memory")
    counted = Count()
    reader = DirectoryReader(url, MODEL)
    await reader.start(counted)
    rebuilt_s = await until(lambda: counted.stored == entries)
    replaced = sum(worker.replace(churn) for worker in workers)
    churned_s = await until(lambda: counted.removed == replaced and counted.stored == entries + replaced)
    lag_s = reader.lag_s
    counted.stored = 0
    admin.flushall()
    for worker in workers:
        # who has nothing to tell notices with the next renewal of its lease
        worker.replace(1)
    again_s = await until(lambda: counted.stored >= entries)
    await reader.stop()
    for worker in workers:
        await worker.publisher.stop()
    return {
        "entries": entries,
        "bytes_per_entry": round((memory["used_memory"] - empty) / entries, 1),
        "redis_resident_mib": memory["used_memory_rss"] >> 20,
        "published_per_s": round(entries / filled_s),
        "rebuilt_s": round(rebuilt_s, 2),
        "churned_per_s": round(2 * replaced / churned_s),
        "lag_ms": round(1000 * lag_s, 1),
        "told_again_s": round(again_s, 2),
        "gaps": reader.gaps,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--churn", type=int, default=1024, help="entries that each worker replaces")
    parser.add_argument("--redis-server", default=EMBEDDED)
    options = parser.parse_args()
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder, run_redis(Path(folder), port, binary=options.redis_server):
        url = f"redis://127.0.0.1:{port}"
        with redis.Redis.from_url(url) as admin:
            version = admin.info("server")["redis_version"]
            found = asyncio.run(measure(url, admin, options.entries, options.workers, options.churn))
    print(json.dumps({"redis": version, "workers": options.workers, **found, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()

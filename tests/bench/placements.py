"""Placements per second of the scheduler's core, on one core, without sockets.

    python tests/bench/placements.py [--workers 64] [--blocks 1000] [--hit-depth 0.5] [--seconds 5]

Prompts of `blocks` full blocks whose leading share (`hit-depth`) one worker holds. Counted are decoding the
frame, placing, encoding the answer, the news of the first token and of the end (after `--live` others), and
ticks; hashing is the routers' work. CPU time of the one thread, so that neighbours don't count; latencies are
on the wall clock. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import time
from collections import deque
from pathlib import Path

from decodefleet.cluster.scheduling.chain import Chain
from decodefleet.cluster.scheduling.config import SchedulingConfig
from decodefleet.cluster.scheduling.prefix_index import PrefixIndex
from decodefleet.cluster.scheduling.scheduler import GlobalScheduler
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import (
    Heartbeat,
    ModelCard,
    Place,
    Placement,
    Register,
    Release,
    Started,
    StepTime,
    ToScheduler,
    WorkerStats,
)
from decodefleet.worker.transport import Codec

BLOCK = 16
STEP_TIME = StepTime(base=0.008, prefill_token=5e-5, kv_token=1e-8, sequence=5e-5)
CARD = ModelCard(
    name="m",
    folder="/nowhere",
    max_model_len=131_072,
    vocab_size=128_000,
    block_size=BLOCK,
    hash_root=bytes(16),
    kv_bytes_per_token=131_072,
)


STATS = WorkerStats(total_blocks=10**7, free_blocks=10**7, max_running=10**6, step_time=STEP_TIME)


def make_fleet(scheduler: GlobalScheduler, workers: int) -> list[WorkerKey]:
    keys = []
    for number in range(workers):
        key = WorkerKey(f"worker-{number}", "one")
        scheduler.register(
            Register(
                worker_id=key.worker_id,
                incarnation=key.incarnation,
                endpoint="tcp://x:1",
                card=CARD,
                stats=STATS,
            ),
            0.0,
        )
        keys.append(key)
    return keys


def make_prompts(rng: random.Random, count: int, blocks: int, shared: int) -> list[bytes]:
    """`count` chains over a tenth as many prefixes of `shared` blocks."""
    prefixes = [rng.randbytes(16 * shared) for _ in range(max(1, count // 10))]
    return [rng.choice(prefixes) + rng.randbytes(16 * (blocks - shared)) for _ in range(count)]


class Load:
    """A scheduler under a stream of requests, told by frames as its server is."""

    def __init__(self, workers: int, blocks: int, hit_depth: float, live: int) -> None:
        rng = random.Random(0)
        self.scheduler = GlobalScheduler(1, SchedulingConfig(), seed=0)
        self.scheduler.directory_up = True
        keys = make_fleet(self.scheduler, workers)
        shared = int(blocks * hit_depth)
        self._prompts = make_prompts(rng, 500, blocks, shared)
        for prompt in self._prompts:
            self.scheduler.index.stored(rng.choice(keys), Chain(prompt).part(0, shared))
        self._decoder: Codec[ToScheduler] = Codec(ToScheduler)
        self._tokens = blocks * BLOCK + 5
        self._live, self._workers, self._beats = live, workers, 0
        self._running: deque[str] = deque()
        self.placed = 0

    def heartbeat(self, now: float) -> None:
        """Of the next worker in turn."""
        worker_id = f"worker-{self._beats % self._workers}"
        self._beats += 1
        self.scheduler.heartbeat(Heartbeat(worker_id=worker_id, incarnation="one", stats=STATS), now)

    def frame(self) -> bytes:
        """The next request, as a router sends it."""
        return self._decoder.encode(
            Place(
                request_id=str(self.placed),
                model="m",
                prompt_tokens=self._tokens,
                block_hashes=self._prompts[self.placed % 500],
                max_new_tokens=256,
            )
        )

    def place(self, frame: bytes, now: float) -> None:
        message = self._decoder.decode(frame)
        assert isinstance(message, Place)
        (*_, answer) = self.scheduler.place(message, "router", now)
        assert isinstance(answer.message, Placement)
        self._decoder.encode(answer.message)

    def follow(self, now: float) -> None:
        """What comes of it: its first token, and the end of an older one."""
        request_id = str(self.placed)
        self.scheduler.started(Started(request_id=request_id), "router", now)
        self._running.append(request_id)
        self.placed += 1
        if len(self._running) > self._live:
            self.scheduler.release(Release(request_id=self._running.popleft(), generated=200), "router", now)


def run(workers: int, blocks: int, hit_depth: float, seconds: float, live: int) -> dict[str, float]:
    load = Load(workers, blocks, hit_depth, live)
    # as the scheduler's process does once it has started
    gc.freeze()
    times: list[float] = []
    cpu_times: list[float] = []
    start, spent = time.perf_counter(), 0.0
    while time.perf_counter() - start < seconds:
        now = 1.0 + (time.perf_counter() - start)
        # four a second of each worker, at 5,000 placements a second
        for _ in range(max(1, workers // 25)):
            load.heartbeat(now)
        for _ in range(50):
            # making frames is the routers' work
            frame = load.frame()
            cpu = time.process_time()
            began = time.perf_counter()
            load.place(frame, now)
            times.append(time.perf_counter() - began)
            cpu_times.append(time.process_time() - cpu)
            load.follow(now)
            spent += time.process_time() - cpu
        cpu = time.process_time()
        load.scheduler.tick(now)
        spent += time.process_time() - cpu
    times.sort()
    cpu_times.sort()
    return {
        "placements": load.placed,
        "placements_per_cpu_s": round(load.placed / spent),
        "cpu_us_per_placement": round(spent / load.placed * 1e6, 1),
        "place_cpu_ms_p99": round(cpu_times[int(len(cpu_times) * 0.99)] * 1e3, 3),
        "place_cpu_ms_max": round(cpu_times[-1] * 1e3, 3),
        "place_ms_p50": round(times[len(times) // 2] * 1e3, 3),
        "place_ms_p99": round(times[int(len(times) * 0.99)] * 1e3, 3),
        "place_ms_max": round(times[-1] * 1e3, 3),
    }


def index_bytes_per_block(blocks: int = 1_000_000, workers: int = 64) -> float:
    """What the local prefix index takes, each block held by one worker."""
    index, rng = PrefixIndex(2 * blocks), random.Random(0)
    before = resident_bytes()
    for number in range(workers):
        for _ in range(16):
            hashes = [rng.randbytes(16) for _ in range(blocks // workers // 16)]
            index.stored(WorkerKey(f"worker-{number}", "one"), hashes)
    return (resident_bytes() - before) / len(index)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--hit-depth", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--live", type=int, default=2000)
    options = vars(parser.parse_args())
    memory = {"index_bytes_per_block": round(index_bytes_per_block())}
    print(json.dumps(options | run(**options) | memory | {"load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()

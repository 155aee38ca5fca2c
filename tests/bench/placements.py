"""Placements per second of the scheduler's core, on one core, without sockets.

    python tests/bench/placements.py [--workers 64] [--blocks 1000] [--hit-depth 0.5] [--seconds 5]

Prompts of `blocks` full blocks whose leading share (`hit-depth`) one worker holds; each placement is started
and released after `--live` others. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import deque

from decodefleet.cluster.scheduling.config import SchedulingConfig
from decodefleet.cluster.scheduling.prefix_index import unpack_hashes
from decodefleet.cluster.scheduling.scheduler import GlobalScheduler
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import (
    ModelCard,
    Place,
    Placement,
    Register,
    Release,
    Started,
    StepTime,
    WorkerStats,
)

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


def make_fleet(scheduler: GlobalScheduler, workers: int) -> list[WorkerKey]:
    stats = WorkerStats(total_blocks=10**7, free_blocks=10**7, max_running=10**6, step_time=STEP_TIME)
    keys = []
    for number in range(workers):
        key = WorkerKey(f"worker-{number}", "one")
        scheduler.register(
            Register(
                worker_id=key.worker_id,
                incarnation=key.incarnation,
                endpoint="tcp://x:1",
                card=CARD,
                stats=stats,
            ),
            0.0,
        )
        keys.append(key)
    return keys


def make_prompts(rng: random.Random, count: int, blocks: int, shared: int) -> list[bytes]:
    """`count` chains over a tenth as many prefixes of `shared` blocks."""
    prefixes = [rng.randbytes(16 * shared) for _ in range(max(1, count // 10))]
    return [rng.choice(prefixes) + rng.randbytes(16 * (blocks - shared)) for _ in range(count)]


def run(workers: int, blocks: int, hit_depth: float, seconds: float, live: int) -> dict[str, float]:
    rng = random.Random(0)
    scheduler = GlobalScheduler(1, SchedulingConfig(), seed=0)
    scheduler.directory_up = True
    keys = make_fleet(scheduler, workers)
    shared = int(blocks * hit_depth)
    prompts = make_prompts(rng, 500, blocks, shared)
    for prompt in prompts:
        scheduler.index.stored(rng.choice(keys), unpack_hashes(prompt[: 16 * shared]))
    running: deque[str] = deque()
    placed, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        now = 1.0 + elapsed / 1000
        for prompt in prompts[placed % 500 :][:50]:
            request_id = str(placed)
            place = Place(
                request_id=request_id,
                model="m",
                prompt_tokens=blocks * BLOCK + 5,
                block_hashes=prompt,
                max_new_tokens=256,
            )
            (*_, answer) = scheduler.place(place, "router", now)
            assert isinstance(answer.message, Placement)
            scheduler.started(Started(request_id=request_id), "router", now)
            running.append(request_id)
            placed += 1
            if len(running) > live:
                scheduler.release(Release(request_id=running.popleft(), generated=200), "router", now)
        scheduler.tick(now)
    return {"placements_per_s": round(placed / elapsed), "us_per_placement": round(elapsed / placed * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--hit-depth", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--live", type=int, default=2000)
    options = vars(parser.parse_args())
    print(json.dumps(options | run(**options) | {"load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()

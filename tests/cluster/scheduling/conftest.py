"""Factories for scheduler tests: cards, workers, requests, and a scheduler with some of them."""

from collections import Counter
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from decodefleet.cluster.scheduling.config import SchedulingConfig
from decodefleet.cluster.scheduling.cost import bounded
from decodefleet.cluster.scheduling.scheduler import GlobalScheduler
from decodefleet.cluster.scheduling.view import NO_LOAD, WorkerKey, WorkerView
from decodefleet.worker.protocol import (
    Heartbeat,
    ModelCard,
    Place,
    Placement,
    Refusal,
    Register,
    StepTime,
    WorkerStats,
)

STEP_TIME = StepTime(base=0.01, prefill_token=1e-3, kv_token=1e-7, sequence=1e-3)
ROUTER = "router"


def make_card(name: str = "m", **changes: Any) -> ModelCard:
    fields = {
        "name": name,
        "folder": "/nowhere",
        "max_model_len": 8192,
        "vocab_size": 1000,
        "block_size": 16,
        "hash_root": b"r" * 16,
        "kv_bytes_per_token": 1024,
    }
    return ModelCard(**fields | changes)


def make_stats(**changes: Any) -> WorkerStats:
    return WorkerStats(**{"total_blocks": 1000, "free_blocks": 1000, "step_time": STEP_TIME} | changes)


def make_register(
    worker_id: str = "w0", incarnation: str = "one", model: str = "m", **stats: Any
) -> Register:
    return Register(
        worker_id=worker_id,
        incarnation=incarnation,
        endpoint=f"tcp://{worker_id}:1",
        card=make_card(model),
        stats=make_stats(**stats),
    )


def make_heartbeat(worker_id: str = "w0", incarnation: str = "one", **stats: Any) -> Heartbeat:
    return Heartbeat(worker_id=worker_id, incarnation=incarnation, stats=make_stats(**stats))


def make_view(
    worker_id: str = "w0", *, last_placed: int = 0, load=NO_LOAD, card=None, **stats: Any
) -> WorkerView:
    reported = make_stats(**stats)
    return WorkerView(
        key=WorkerKey(worker_id, "one"),
        endpoint=f"tcp://{worker_id}:1",
        card=card or make_card(),
        stats=reported,
        load=load,
        step_time=bounded(reported.step_time),
        last_heartbeat=0.0,
        last_placed=last_placed,
    )


def make_place(request_id: str = "a", **changes: Any) -> Place:
    fields = {"request_id": request_id, "model": "m", "prompt_tokens": 64, "max_new_tokens": 32}
    return Place(**fields | changes)


def make_hashes(count: int, seed: int = 0) -> list[bytes]:
    random = Random(seed)
    return [random.randbytes(16) for _ in range(count)]


def make_scheduler(workers: int = 1, now: float = 0.0, *, stats: dict[str, Any] | None = None, **config: Any):
    """A scheduler with workers w0, w1, … and one router, all heard of at `now`."""
    scheduler = GlobalScheduler(1, SchedulingConfig(**config), seed=0)
    for number in range(workers):
        scheduler.register(make_register(f"w{number}", **stats or {}), now)
    scheduler.hello(ROUTER, now)
    return scheduler


def placed(outgoing) -> dict[str, Placement]:
    """Placements in what a scheduler sent, by request id."""
    return {each.message.request_id: each.message for each in outgoing if isinstance(each.message, Placement)}


def refusals(outgoing) -> dict[str, str]:
    """Reasons in what a scheduler sent, by request id."""
    return {
        each.message.request_id: each.message.reason for each in outgoing if isinstance(each.message, Refusal)
    }


def spread(scheduler: GlobalScheduler, count: int, now: float = 0.1, **place: Any) -> Counter[str]:
    """Workers that `count` requests placed at the same moment went to."""
    workers: Counter[str] = Counter()
    for number in range(count):
        outgoing = scheduler.place(make_place(f"r{number}", **place), ROUTER, now)
        workers.update(placement.worker_id for placement in placed(outgoing).values())
    scheduler.check_integrity()
    return workers


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """The factories of this module."""
    factories: list[Callable[..., Any]] = [
        make_card,
        make_stats,
        make_register,
        make_heartbeat,
        make_view,
        make_place,
        make_hashes,
        make_scheduler,
    ]
    return SimpleNamespace(
        **{factory.__name__.removeprefix("make_"): factory for factory in factories},
        placed=placed,
        refusals=refusals,
        spread=spread,
    )

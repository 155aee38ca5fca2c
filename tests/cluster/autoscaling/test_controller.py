"""Beside a scheduler in this process: it asks, it wakes, it outlives mistakes."""

import asyncio
import time

import pytest
from waiting import eventually

from decodefleet.cluster.autoscaling import controller as module
from decodefleet.cluster.autoscaling.controller import ScalingController
from decodefleet.cluster.scheduling.config import SchedulingConfig
from decodefleet.cluster.scheduling.scheduler import GlobalScheduler
from decodefleet.worker.protocol import ModelCard, Place, Register, WorkerStats

CARD = ModelCard(
    name="m",
    folder="",
    max_model_len=8192,
    vocab_size=10,
    block_size=16,
    hash_root=b"",
    kv_bytes_per_token=1024,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "WAKE_AGAIN_S", 0.01)


def ask(core: GlobalScheduler, count: int) -> None:
    for number in range(count):
        place = Place(request_id=f"r{number}", model="m", prompt_tokens=3000, max_new_tokens=10)
        core.place(place, "router", time.monotonic())


def register(core: GlobalScheduler, worker_id: str = "w0") -> None:
    stats = WorkerStats(total_blocks=10_000, free_blocks=10_000)
    message = Register(worker_id=worker_id, incarnation="1", endpoint="x", card=CARD, stats=stats)
    core.register(message, time.monotonic())


async def test_load_makes_it_want_more(make):
    core = GlobalScheduler(1, SchedulingConfig(worker_timeout_s=1e6))
    register(core)
    controller = ScalingController(core, make.config(max_workers=6), "m", step_target_s=0.075, wake=never)
    controller.start()
    # a minute of prefill
    ask(core, 200)
    await eventually(lambda: controller.wanted >= 2)
    await controller.stop()


async def test_a_sleeping_fleet_is_woken_until_it_comes(make):
    core, woken = GlobalScheduler(1, SchedulingConfig(worker_timeout_s=1e6)), []

    async def wake() -> None:
        woken.append(len(core.queue))
        if len(woken) < 3:
            raise RuntimeError("no machine yet")
        register(core)

    controller = ScalingController(core, make.config(min_workers=0), "m", step_target_s=0.075, wake=wake)
    controller.start()
    await asyncio.sleep(0.05)
    assert woken == []
    ask(core, 2)
    await eventually(lambda: len(core.ledger) == 2)
    await controller.stop()
    assert woken == [2, 2, 2]
    assert controller.wanted >= 1


async def never() -> None:
    raise AssertionError("nothing sleeps")

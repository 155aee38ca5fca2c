"""Factories for tests of the simulator: machines, arrivals, workers that write down what they tell."""

from types import SimpleNamespace
from typing import Any

import pytest

from decodefleet.cluster.simulate.arrivals import Arrival
from decodefleet.cluster.simulate.fleet import Blueprint
from decodefleet.cluster.simulate.machine import Machine, StepCost
from decodefleet.cluster.simulate.worker import SimulatedWorker
from decodefleet.worker.config import BatchConfig

BLOCK = 16
COST = StepCost(base=0.01, prefill_token=1e-4, kv_token=1e-6, sequence=1e-3)


class Diary:
    """A listener: when each request's first and last token came, by number, and every gap."""

    def __init__(self) -> None:
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.cached: dict[int, int] = {}
        self.gaps: list[tuple[float, int]] = []

    def stepped(self, seconds: float, tokens: int) -> None:
        self.gaps.append((seconds, tokens))

    def resumed(self, seconds: float) -> None:
        self.gaps.append((seconds, 1))

    def started(self, sequence) -> None:
        self.first[sequence.number] = sequence.first_at

    def ended(self, sequence) -> None:
        self.last[sequence.number] = sequence.last_at
        self.cached[sequence.number] = sequence.cached_tokens


def make_chain(names: str) -> bytes:
    """One block per letter; equal letters are equal blocks."""
    return b"".join(name.encode().rjust(16, b"\0") for name in names)


def make_arrival(prompt: int = 32, output: int = 4, chain: str = "", at: float = 0.0) -> Arrival:
    return Arrival(at, prompt, output, make_chain(chain))


def make_blueprint(*, tokens: int = 16 * 1000, cost: StepCost = COST, **batch: Any) -> Blueprint:
    fields = {"itl_target_ms": 0.0, "max_num_batched_tokens": 512} | batch
    return Blueprint(Machine(cost, tokens, 1024), BatchConfig(**fields), BLOCK)


def make_worker(**changes: Any) -> tuple[SimulatedWorker, Diary]:
    diary = Diary()
    return make_blueprint(**changes).worker(diary), diary


def drive(worker: SimulatedWorker, arrivals: list[Arrival], *, check: bool = True) -> None:
    """Until everything has ended, arrivals numbered in order."""
    left = list(enumerate(arrivals))
    while left or worker.wakes_at is not None:
        due = worker.wakes_at
        if left and (due is None or left[0][1].at < due):
            number, arrival = left.pop(0)
            worker.submit(number, arrival, arrival.at)
        else:
            worker.settle(due)
        if check:
            worker.check_integrity()


@pytest.fixture
def make() -> SimpleNamespace:
    return SimpleNamespace(
        chain=make_chain,
        arrival=make_arrival,
        blueprint=make_blueprint,
        worker=make_worker,
        drive=drive,
        cost=COST,
        block=BLOCK,
    )

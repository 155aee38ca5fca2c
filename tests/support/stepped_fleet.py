"""The scheduler's core over workers that step in virtual time: load in, answers out, the same each time.

A worker gives every sequence it has a token per step and takes in any number at once, as long as nobody
queues. A seat that comes free at the end of a step is taken while the next one runs, and used by the one
after that, as over sockets. Small enough to be read beside a test; `cluster.simulate` is the real thing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from decodefleet.cluster.scheduling.config import SchedulingConfig
from decodefleet.cluster.scheduling.outgoing import Outgoing
from decodefleet.cluster.scheduling.scheduler import GlobalScheduler
from decodefleet.worker.protocol import (
    Heartbeat,
    ModelCard,
    Place,
    Placement,
    Refusal,
    Register,
    Release,
    Started,
    StepTime,
    WorkerStats,
)

ROUTER = "router"
TRANSFER_S = 0.001
CARD = ModelCard(
    name="m",
    folder="/nowhere",
    max_model_len=8192,
    vocab_size=1000,
    block_size=16,
    hash_root=bytes(16),
    kv_bytes_per_token=1024,
)


@dataclass
class Answer:
    """What became of a request; times are virtual. submitted: to a worker. refused: why, if it was."""

    asked: float
    tenant: str
    tokens: int
    submitted: float = 0.0
    first: float | None = None
    ended: float | None = None
    refused: str | None = None

    @property
    def ttft(self) -> float:
        assert self.first is not None
        return self.first - self.asked


def poisson(rng: Random, rate: float, seconds: float, tokens: int, tenant: str = "") -> list[Answer]:
    """Requests that come by chance, so many a second, and take half as many tokens more or less."""
    answers, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        answers.append(Answer(now, tenant, rng.randint(tokens // 2, tokens + tokens // 2)))
    return answers


@dataclass
class SteppedFleet:
    """workers × seats sequences at once, a token each per step of `step_s`."""

    workers: int
    seats: int
    step_s: float
    config: SchedulingConfig
    now: float = 0.0
    running: dict[str, list[str]] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = GlobalScheduler(1, self.config, seed=0)
        self.running = {f"w{number}": [] for number in range(self.workers)}
        for worker_id in self.running:
            register = Register(
                worker_id=worker_id, incarnation="1", endpoint="", card=CARD, stats=self._stats(worker_id)
            )
            self.core.register(register, 0.0)

    def serve(self, load: Iterable[Answer]) -> list[Answer]:
        """Until all of it is answered, a step at a time; requests come between steps."""
        coming = deque(sorted(load, key=lambda answer: answer.asked))
        known = [*coming]
        while coming or self.answers:
            while coming and coming[0].asked <= self.now:
                self._ask(coming.popleft())
            self.now += self.step_s
            for worker_id in self.running:
                self._step(worker_id)
            self._take(self.core.hello(ROUTER, self.now))
            self._take(self.core.tick(self.now))
        self.core.check_integrity()
        return known

    def _ask(self, answer: Answer) -> None:
        request_id = str(id(answer))
        self.answers[request_id] = answer
        place = Place(
            request_id=request_id,
            model="m",
            prompt_tokens=64,
            max_new_tokens=answer.tokens,
            tenant=answer.tenant,
        )
        self._take(self.core.place(place, ROUTER, answer.asked), answer.asked)

    def _step(self, worker_id: str) -> None:
        for request_id in [*self.running[worker_id]]:
            answer = self.answers[request_id]
            if answer.submitted > self.now - self.step_s:
                continue
            if answer.first is None:
                answer.first = self.now
                self._take(self.core.started(Started(request_id=request_id), ROUTER, self.now))
            elif self.now >= answer.first + (answer.tokens - 1) * self.step_s - 1e-9:
                answer.ended = self.now
                self.running[worker_id].remove(request_id)
                del self.answers[request_id]
                release = Release(request_id=request_id, generated=answer.tokens)
                self._take(self.core.release(release, ROUTER, self.now))
        heartbeat = Heartbeat(worker_id=worker_id, incarnation="1", stats=self._stats(worker_id))
        self._take(self.core.heartbeat(heartbeat, self.now))

    def _take(self, outgoing: Iterable[Outgoing], now: float | None = None) -> None:
        """now: when it is sent; just after the step that has ended if not given."""
        for _, message in outgoing:
            if isinstance(message, Placement):
                self.running[message.worker_id].append(message.request_id)
                self.answers[message.request_id].submitted = self.now + TRANSFER_S if now is None else now
            elif isinstance(message, Refusal):
                self.answers.pop(message.request_id).refused = message.reason

    def _stats(self, worker_id: str) -> WorkerStats:
        return WorkerStats(
            running=len(self.running[worker_id]),
            total_blocks=100_000,
            free_blocks=100_000,
            max_running=self.seats,
            step_time=StepTime(base=self.step_s, prefill_token=1e-6, kv_token=0.0, sequence=1e-6),
        )

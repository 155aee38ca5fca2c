"""One simulated run: a trace through the real scheduler core onto simulated workers, on a clock of its own.

The scheduler hears what it would in life: places and releases at once, reports and the directory's news late.
Deterministic: everything follows from trace, fleet, policy and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from decodefleet.worker.protocol import Place, Placement, Refusal, Release, Started

from ..scheduling.config import MAX_QUEUE, SchedulingConfig
from ..scheduling.scheduler import GlobalScheduler, Outgoing
from .arrivals import Arrival
from .events import Events
from .fleet import MODEL, Blueprint, Delays, Member
from .outcome import Recorder, Served
from .policies import Named
from .sequences import Sequence as Running

ROUTER = "router"
TICK_S = 0.05
HELLO_S = 5.0
IN_LIFE = Delays()

Progress = Callable[[int], None]
"""Called with the number of requests that have ended since the last call."""


class _Client:
    """The requests on one worker, as their router knows them."""

    def __init__(self, simulation: Simulation, worker_id: str) -> None:
        self._simulation, self._worker_id = simulation, worker_id

    def stepped(self, seconds: float, tokens: int) -> None:
        self._simulation.recorder.gaps.add(seconds, tokens)

    def resumed(self, seconds: float) -> None:
        self._simulation.recorder.gaps.add(seconds)

    def started(self, sequence: Running) -> None:
        self._simulation.started(sequence)

    def ended(self, sequence: Running) -> None:
        self._simulation.ended(sequence, self._worker_id)


class Simulation:
    """add_worker before or while it runs; `run` once."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        blueprint: Blueprint,
        policy: Named,
        *,
        max_queue: int = MAX_QUEUE,
        delays: Delays = IN_LIFE,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.arrivals, self.blueprint = arrivals, blueprint
        self.policy = policy.policy.name
        self.events = Events()
        self.recorder = Recorder()
        self.members: dict[str, Member] = {}
        self.retired: list[Member] = []
        config = SchedulingConfig(late_binding=policy.late_binding, max_queue=max_queue)
        self.scheduler = GlobalScheduler(1, config, seed=seed, policy=policy.policy)
        self.scheduler.directory_up = True
        self._delays, self._progress = delays, progress
        self._rng = Random(seed)
        # of workers that were ordered and sent back before they served
        self.wasted_s = 0.0
        self._ended = 0
        self._hired = 0
        self._next = 0

    @property
    def done(self) -> bool:
        return self._ended == len(self.arrivals)

    def add_worker(self, ordered_at: float | None = None) -> Member:
        """ordered_at: since when it costs; now if not given."""
        worker_id = f"worker-{self._hired}"
        self._hired += 1
        worker = self.blueprint.worker(_Client(self, worker_id))
        member = Member(
            worker_id,
            worker,
            self.blueprint.card(),
            self.scheduler,
            self.events,
            self._delays,
            self._deliver,
        )
        if ordered_at is not None:
            member.since = ordered_at
        self.members[worker_id] = member
        member.register(self._rng.random())
        return member

    def retire(self, worker_id: str) -> None:
        """Drain it; it goes when its last request has ended."""
        self.members[worker_id].drain()
        self._retire_if_idle(worker_id)

    def run(self) -> None:
        events = self.events
        events.every(TICK_S, 0.0, self._tick)
        events.every(HELLO_S, 0.0, self._hello)
        self._arrive_later()
        events.run(lambda: self.done)

    def started(self, sequence: Running) -> None:
        message = Started(request_id=str(sequence.number))
        self._deliver(self.scheduler.started(message, ROUTER, self.events.now))

    def ended(self, sequence: Running, worker_id: str) -> None:
        arrival, first = sequence.arrival, sequence.first_at
        assert first is not None
        assert sequence.cached_tokens is not None
        tokens = sequence.generated
        self.recorder.served.append(
            Served(
                arrival.at,
                first - arrival.at,
                (sequence.last_at - first) / (tokens - 1) if tokens > 1 else None,
                arrival.prompt_tokens,
                tokens,
                sequence.cached_tokens,
            )
        )
        self.recorder.presence[worker_id] += sequence.last_at - sequence.placed_at
        self._count_ended()
        message = Release(request_id=str(sequence.number), generated=tokens)
        self._deliver(self.scheduler.release(message, ROUTER, self.events.now))
        if self.members[worker_id].draining:
            self.events.at(self.events.now, partial(self._retire_if_idle, worker_id))

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        for member in self.members.values():
            member.worker.check_integrity()

    def _tick(self) -> None:
        self._deliver(self.scheduler.tick(self.events.now))

    def _hello(self) -> None:
        self.scheduler.hello(ROUTER, self.events.now)

    def _arrive_later(self) -> None:
        if self._next < len(self.arrivals):
            self.events.at(self.arrivals[self._next].at, self._arrive)

    def _arrive(self) -> None:
        number = self._next
        self._next += 1
        arrival = self.arrivals[number]
        place = Place(
            request_id=str(number),
            model=MODEL,
            prompt_tokens=arrival.prompt_tokens,
            block_hashes=arrival.chain,
            max_new_tokens=max(1, self.blueprint.max_len - arrival.prompt_tokens),
        )
        self._deliver(self.scheduler.place(place, ROUTER, self.events.now))
        self._arrive_later()

    def _deliver(self, outgoing: list[Outgoing]) -> None:
        for _, message in outgoing:
            if isinstance(message, Placement):
                self._submit(message)
            elif isinstance(message, Refusal):
                self.recorder.refused[message.reason] += 1
                self._count_ended()

    def _submit(self, placement: Placement) -> None:
        number = int(placement.request_id)
        arrival = self.arrivals[number]
        # what a worker's memory holds bounds an answer
        most = max(1, self.blueprint.max_len - arrival.prompt_tokens)
        if arrival.output_tokens > most:
            arrival = arrival._replace(output_tokens=most)
        self.members[placement.worker_id].submit(number, arrival)

    def _count_ended(self) -> None:
        self._ended += 1
        if self._progress is not None:
            self._progress(1)

    def _retire_if_idle(self, worker_id: str) -> None:
        member = self.members.get(worker_id)
        if member is not None and member.draining and not member.worker.sequences:
            member.leave()
            self.retired.append(self.members.pop(worker_id))

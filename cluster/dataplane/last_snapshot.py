"""What the last scheduler told of the workers, and what this router has sent them since.

While no scheduler answers, requests are placed by it: of two workers taken at random, the one that should
have less to do. Nothing is reserved, so that it is a way through some seconds and not another scheduler.
Pure bookkeeping; knows neither sockets nor time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from random import Random

from decodefleet.worker.protocol import Place, Placement, Welcome, WorkerBrief

Life = tuple[str, str]
"""A worker and its incarnation."""


class LastSnapshot:
    def __init__(self, rng: Random | None = None) -> None:
        self.epoch = 0
        self._rng = rng or Random()
        self._workers: dict[Life, WorkerBrief] = {}
        # requests of ours, by the worker that has them; and how many there were when the snapshot was taken
        self._placed: dict[str, str] = {}
        self._own: Counter[str] = Counter()
        self._own_then: Counter[str] = Counter()
        self._sequences: dict[str, int] = {}

    @property
    def models(self) -> frozenset[str]:
        """Those that some worker serves, as far as is known."""
        return frozenset(brief.model for brief in self._workers.values())

    @property
    def lives(self) -> Set[Life]:
        """Workers that take requests, as far as is known."""
        return self._workers.keys()

    def note(self, welcome: Welcome, *, believe: bool) -> bool:
        """What a scheduler says; whether it counts. One that has only just begun and knows of nobody yet is
        not believed."""
        if welcome.epoch > self.epoch and not welcome.ready and not believe:
            return False
        self.epoch = welcome.epoch
        self._workers = {(brief.worker_id, brief.incarnation): brief for brief in welcome.workers}
        self._own_then = self._own.copy()
        return True

    def lose(self, life: Life) -> None:
        """We have found out ourselves that it is gone."""
        self._workers.pop(life, None)

    def placed(self, place: Place, worker_id: str) -> None:
        self.released(place.request_id)
        self._placed[place.request_id] = worker_id
        self._sequences[place.request_id] = place.n
        self._own[worker_id] += place.n

    def released(self, request_id: str) -> None:
        worker_id = self._placed.pop(request_id, None)
        if worker_id is not None:
            self._own[worker_id] -= self._sequences.pop(request_id)

    def choose(self, place: Place, epoch: int, *, crowd: bool) -> Placement | None:
        """A worker for the request, None where there is none. crowd: full ones will do."""
        able = [
            brief
            for brief in self._workers.values()
            if brief.model == place.model
            and brief.worker_id not in place.exclude
            and (crowd or self._has_room(brief, place.n))
        ]
        if not able:
            return None
        chosen = min(self._rng.sample(able, min(2, len(able))), key=self._load)
        return Placement(
            request_id=place.request_id,
            attempt=place.attempt,
            worker_id=chosen.worker_id,
            incarnation=chosen.incarnation,
            endpoint=chosen.endpoint,
            epoch=epoch,
            predicted_s=0.0,
        )

    def _has_room(self, brief: WorkerBrief, n: int) -> bool:
        return brief.max_running is None or self._load(brief) + n <= brief.max_running

    def _load(self, brief: WorkerBrief) -> int:
        """Sequences there: what was told, and how ours have changed since."""
        own = self._own[brief.worker_id] - self._own_then[brief.worker_id]
        return max(0, brief.sequences + own)

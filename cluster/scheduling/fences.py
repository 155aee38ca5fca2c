"""Which lives of workers routers must take their streams away from, told for long enough that none misses it.

A worker that drains keeps its streams, so it is not here. Decides nothing: the fleet does.
"""

from __future__ import annotations

from decodefleet.worker.protocol import Fenced, FenceReason

from .fleet import Fleet
from .view import WorkerKey

# routers are told at once, and with every greeting; those that were away ask within seconds
_TOLD_FOR_S = 30.0


class Fences:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lost: dict[WorkerKey, tuple[FenceReason, float]] = {}

    def lose(self, key: WorkerKey, reason: FenceReason, now: float) -> None:
        """The fleet has removed it."""
        self._lost[key] = (reason, now)

    def readmit(self, key: WorkerKey) -> None:
        """It was silent, and is back as it was."""
        self._lost.pop(key, None)

    def told(self, now: float) -> tuple[Fenced, ...]:
        self._lost = {key: (reason, at) for key, (reason, at) in self._lost.items() if now - at < _TOLD_FOR_S}
        lost = [Fenced(*key, reason) for key, (reason, _) in self._lost.items()]
        stalled = [
            Fenced(*member.key, "stalled")
            for member in self._fleet
            if self._fleet.fence(member, now) == "stalled"
        ]
        return (*lost, *stalled)

"""Whether a request whose attempt failed goes on: how soon, and without whom. Pure: errors in, verdicts out.

A token forgives the failures before it, but for the count of workers lost in all: a request that kills each
worker it meets must not meet all of them. Knows nothing of time: deadlines are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dataplane.errors import DataplaneError, PlacementRefused, WorkerLost, WorkerMoved, WorkerRejected

# failures in a row without a token between them
MAX_FRUITLESS = 3
# workers that a request may lose to anything but their draining
MAX_LOSSES = 8
MAX_OUTDATED = 30
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0

# another worker, or the same one later, may well take what was rejected for these reasons
_PASSING = {"draining", "queue_full"}
# the worker itself is fine for these: only what was known of it was old
_OUTDATED = {"incarnation", "epoch"}
# a client in the middle of its text is not told that there is no room just now
_ROOM_LATER = {"no_worker", "queue_full", "unknown_model"}


@dataclass(frozen=True, slots=True)
class Again:
    """Try once more, after a pause. avoid: not where the last attempt was."""

    pause_s: float = 0.0
    avoid: bool = True


class Recovery:
    """The failures of one request so far."""

    def __init__(self) -> None:
        self._fruitless = 0
        self._losses = 0
        self._outdated = 0

    def after(self, error: DataplaneError, *, progress: bool, begun: bool) -> Again | None:
        """What to do about a failure; None where it is final.

        progress: the attempt brought a token. begun: some attempt did.
        """
        if progress:
            self._fruitless = self._outdated = 0
        match error:
            case PlacementRefused():
                return self._refused(error, begun)
            case WorkerRejected() if error.rejected.reason in _OUTDATED:
                return self._known_too_late()
            case WorkerRejected() if error.rejected.reason in _PASSING:
                return self._failed()
            case WorkerMoved(why="drained"):
                return self._failed()
            case WorkerLost(reached=False):
                return self._known_too_late(avoid=True)
            case WorkerLost() | WorkerMoved():
                self._losses += 1
                return self._failed() if self._losses <= MAX_LOSSES else None
        return None

    def _failed(self) -> Again | None:
        self._fruitless += 1
        return Again() if self._fruitless <= MAX_FRUITLESS else None

    def _known_too_late(self, *, avoid: bool = False) -> Again | None:
        self._outdated += 1
        if self._outdated > MAX_OUTDATED:
            return None
        # at once the first time: what the scheduler says next is usually new
        pause_s = FIRST_PAUSE_S * 2 ** (self._outdated - 2) if self._outdated > 1 else 0.0
        return Again(min(pause_s, MAX_PAUSE_S), avoid)

    def _refused(self, error: PlacementRefused, begun: bool) -> Again | None:
        if not begun or error.refusal.reason not in _ROOM_LATER:
            return None
        return Again(min(error.refusal.retry_after_s or MAX_PAUSE_S, MAX_PAUSE_S), avoid=False)

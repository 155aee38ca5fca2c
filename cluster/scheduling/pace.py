"""How fast a model's queue moves, and how long a newcomer would wait in it. Pure.

The clock runs only while somebody waits: how fast requests are placed when nobody does says how many come,
not how many could be served.
"""

from __future__ import annotations

from .queue import Waiter, WaitQueue

# of those that left the queue about so many count, or as many as run at once if these are more
_MEMORY = 128


class Pace:
    def __init__(self) -> None:
        self._elapsed = 0.0
        self._moved = 0.0
        self._memory = float(_MEMORY)
        self._since: float | None = None

    def waits(self, now: float, running: int) -> None:
        """Somebody waits for one of the `running` requests to end.

        What was known counts for as many as run, all of which may have begun just now: that none of them ends
        for as long as an answer takes does not say that the queue stands still.
        """
        if self._since is None:
            self._since = now
            self._memory = float(_MEMORY)
        self._memory = max(self._memory, running)
        if running > self._moved:
            if self._moved:
                self._elapsed *= running / self._moved
            self._moved = float(running)

    def moved(self, now: float) -> None:
        """Somebody was placed, which counts while others wait."""
        if self._since is None:
            return
        self._advance(now)
        fade = 1 - 1 / self._memory
        self._elapsed *= fade
        self._moved = self._moved * fade + 1

    def rests(self, now: float) -> None:
        """Nobody waits any more, or nobody is there to wait for."""
        self._advance(now)
        self._since = None

    def interval_s(self, now: float) -> float:
        """Seconds from one that leaves the queue to the next; zero while nothing is known."""
        running = 0.0 if self._since is None else now - self._since
        return (self._elapsed + running) / (self._moved + 1)

    def _advance(self, now: float) -> None:
        if self._since is not None:
            self._elapsed += now - self._since
            self._since = now


def turns_until(waiter: Waiter, queue: WaitQueue) -> float:
    """How many leave the queue until this one, itself included, if all requests are of one size.

    Those of more urgent classes, its tenant's own before it, and of each other tenant as many per own one as
    their weights say.
    """
    place, share = waiter.place, queue.share(waiter.place.model)
    turns = 0.0
    for urgency, tenants in queue.classes(place.model).items():
        if urgency < waiter.urgency:
            turns += sum(len(line) for line in tenants.values())
        elif urgency == waiter.urgency:
            own = 1 + queue.ahead(waiter)
            weight = share.weight(place.tenant)
            turns += own + sum(
                min(len(line), own * share.weight(tenant) / weight)
                for tenant, line in tenants.items()
                if tenant != place.tenant
            )
    return turns

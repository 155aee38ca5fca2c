"""The routers that have been heard of, and what they were told last. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from decodefleet.worker.protocol import Fenced, Welcome, WorkerBrief

from .fleet import Fleet
from .outgoing import Outgoing
from .view import WorkerKey


class Routers:
    """briefs: what they need to place without us, at a given time."""

    def __init__(
        self, epoch: int, timeout_s: float, briefs: Callable[[float], tuple[WorkerBrief, ...]]
    ) -> None:
        self._timeout_s = timeout_s
        self._briefs = briefs
        self._seen: dict[str, float] = {}
        self._welcome = Welcome(epoch=epoch, models=())
        self._lives: set[WorkerKey] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._seen)

    def __contains__(self, router_id: str) -> bool:
        return router_id in self._seen

    @property
    def welcome(self) -> Welcome:
        """What routers were told last, but for the workers' load, which every greeting tells anew."""
        return self._welcome

    def greet(self, router_id: str, now: float) -> list[Outgoing]:
        self._seen[router_id] = now
        return [Outgoing(router_id, self._now(now))]

    def see(self, router_id: str, now: float) -> list[Outgoing]:
        """One that is heard of for the first time is greeted, whatever it said."""
        if router_id not in self._seen:
            return self.greet(router_id, now)
        self._seen[router_id] = now
        return []

    def forget(self, router_id: str) -> None:
        self._seen.pop(router_id, None)

    def silent(self, now: float) -> list[str]:
        return [router_id for router_id, seen in self._seen.items() if now - seen > self._timeout_s]

    def tell(self, fleet: Fleet, fenced: tuple[Fenced, ...], now: float) -> list[Outgoing]:
        """Welcome for every router when workers, models, their readiness or the fences have changed."""
        welcome = Welcome(
            epoch=self._welcome.epoch, models=fleet.cards, ready=fleet.ready(now), fenced=fenced
        )
        lives = fleet.keys()
        if welcome == self._welcome and lives == self._lives:
            return []
        self._welcome, self._lives = welcome, lives
        message = self._now(now)
        return [Outgoing(router_id, message) for router_id in self._seen]

    def _now(self, now: float) -> Welcome:
        return msgspec.structs.replace(self._welcome, workers=self._briefs(now), routers=len(self._seen))

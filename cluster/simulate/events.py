"""A clock and what is due on it: the discrete events of a simulation, in order of time, then of asking."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Do it then, or at once where that has passed."""
        self._asked += 1
        heapq.heappush(self._due, (max(moment, self.now), self._asked, action))

    def every(self, interval: float, first: float, action: Callable[[], bool | None]) -> None:
        """Again and again, until it returns False."""

        def again() -> None:
            if action() is not False:
                self.at(self.now + interval, again)

        self.at(first, again)

    def run(self, until: Callable[[], bool]) -> None:
        """Until that holds, or nothing is due any more."""
        due = self._due
        while due and not until():
            moment, _, action = heapq.heappop(due)
            self.now = moment
            action()

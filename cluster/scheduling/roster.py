"""One registered worker, and those that serve one model as candidates for its requests.

Most workers have not changed from one placement to the next, so that their table is kept up to date row by
row. Knows neither requests nor who is fenced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from decodefleet.worker.protocol import ModelCard, WorkerStats

from .candidates import FIGURES, Array, Candidates, common_card, figures_of
from .view import NO_LOAD, Load, WorkerKey, WorkerView


@dataclass(slots=True)
class Member:
    """foreign: what its last report showed beyond our reservations. settling: what was given back lately,
    when, since reports may show it still. view: None when it is out of date.
    """

    key: WorkerKey
    endpoint: str
    card: ModelCard
    stats: WorkerStats
    registered_at: float
    last_heartbeat: float
    foreign: Load = NO_LOAD
    settling: deque[tuple[float, Load]] = field(default_factory=deque)
    last_placed: int = 0
    peer_endpoint: str = ""
    view: WorkerView | None = field(default=None, repr=False)


class Roster:
    """view_of: makes a member's view. heard: the oldest of their heartbeats when the roster was made."""

    def __init__(self, members: Sequence[Member], view_of: Callable[[Member], WorkerView]) -> None:
        self.members = members
        self.heard = min((member.last_heartbeat for member in members), default=float("inf"))
        self._view_of = view_of
        self._rows = {member.key: row for row, member in enumerate(members)}
        self._card = common_card([member.card for member in members])
        # in the order of the rows, which a dict keeps when it is first filled in it
        self._stale: dict[int, None] = dict.fromkeys(range(len(members)))
        self._views: dict[int, WorkerView] = {}
        self._table: Array = np.empty((FIGURES, len(members)))

    def changed(self, key: WorkerKey) -> None:
        row = self._rows.get(key)
        if row is not None:
            self._stale[row] = None

    def candidates(self) -> Candidates:
        """Its columns are good until the next event. There must be members."""
        for row in self._stale:
            view = self._views[row] = self._view_of(self.members[row])
            self._table[:, row] = figures_of(view)
        self._stale.clear()
        return Candidates(tuple(self._views.values()), self._table, self._card, self._rows)

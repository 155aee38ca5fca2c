"""Workers that could take a request: a view each, and the same figures in columns, one row per worker.

What a placement asks of every worker it asks of a column, so that it takes a few array operations however
many workers there are. Pure; knows neither costs nor policies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from decodefleet.worker.protocol import ModelCard

from .view import NO_HIT, Demand, Hit, Hits, WorkerKey, WorkerView

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_UNLIMITED = float("inf")


class Rates(NamedTuple):
    """What a cost takes from a worker, in seconds: in any case, per uncached token, per token of context
    read, per sequence; and how many sequences run there, alone and times each of these."""

    fixed: float
    prefill_token: float
    kv_token: float
    sequence: float
    running: float
    running_prefill: float
    running_kv: float
    running_sequence: float


class Room(NamedTuple):
    """What a worker can still take; infinite where nothing limits it.

    seats: sequences. pool: blocks of any one request. haste: negative seconds of prefill before its own, so
    that of this too more is better.
    """

    seats: float
    blocks: float
    pool: float
    haste: float


_RATES = len(Rates._fields)
_RUNNING = Rates._fields.index("running")
_HASTE = Room._fields.index("haste")
FIGURES = _RATES + len(Room._fields)


def figures_of(view: WorkerView) -> tuple[float, ...]:
    """A worker's row."""
    return *rates_of(view), *room_of(view)


def rates_of(view: WorkerView) -> Rates:
    step, running = view.step_time, view.load.sequences
    return Rates(
        view.start_s + view.step_s,
        step.prefill_token,
        step.kv_token,
        step.sequence,
        running,
        running * step.prefill_token,
        running * step.kv_token,
        running * step.sequence,
    )


def room_of(view: WorkerView) -> Room:
    stats, load = view.stats, view.load
    pool = stats.total_blocks or _UNLIMITED
    # an idle worker takes any prompt that its pool holds at all
    if not load.sequences:
        return Room(_UNLIMITED, _UNLIMITED, pool, -view.start_s)
    seats = _UNLIMITED if stats.max_running is None else stats.max_running - load.sequences
    return Room(seats, stats.total_blocks - load.blocks, pool, -view.start_s)


class Candidates(Sequence[WorkerView]):
    """table: [figures, workers], as `figures_of` gives them; whose it is may change it with the next event.
    card: that of all of them, None where they differ. rows: whose is which.
    """

    def __init__(
        self,
        views: tuple[WorkerView, ...],
        table: Array,
        card: ModelCard | None,
        rows: Mapping[WorkerKey, int],
    ) -> None:
        self.views = views
        self.card = card
        self.rows = rows
        self._table = table

    @classmethod
    def of(cls, views: Sequence[WorkerView]) -> Candidates:
        table = np.array([figures_of(view) for view in views], float).T
        return cls(tuple(views), table, common_card([view.card for view in views]), _rows(views))

    @overload
    def __getitem__(self, at: int) -> WorkerView: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[WorkerView, ...]: ...

    def __getitem__(self, at: int | slice) -> WorkerView | tuple[WorkerView, ...]:
        return self.views[at]

    def __len__(self) -> int:
        return len(self.views)

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self.views)

    @property
    def rates(self) -> Array:
        """[fields of Rates, workers]"""
        return self._table[:_RATES]

    @property
    def room(self) -> Array:
        """[fields of Room, workers]"""
        return self._table[_RATES:]

    @property
    def mean_running(self) -> float:
        """Sequences on one of them."""
        return float(self._table[_RUNNING].sum()) / len(self.views)

    def hits(self, hits: Hits) -> Iterator[tuple[int, Hit]]:
        """Those who hold something of the prompt, by row."""
        for key, hit in hits.items():
            if (row := self.rows.get(key)) is not None:
                yield row, hit

    def only(self, chosen: Mask) -> Candidates:
        """Those whose row is true."""
        if chosen.all():
            return self
        views = tuple(compress(self.views, chosen.tolist()))
        return Candidates(views, self._table[:, chosen], self.card, _rows(views))


def _rows(views: Sequence[WorkerView]) -> dict[WorkerKey, int]:
    return {view.key: row for row, view in enumerate(views)}


def common_card(cards: Sequence[ModelCard]) -> ModelCard | None:
    first = next(iter(cards), None)
    return first if all(card is first or card == first for card in cards) else None


def with_room(candidates: Candidates, demand: Demand, hits: Hits, ahead_s: float) -> Candidates:
    """Those where it need not queue for memory, nor behind more than `ahead_s` of prefill.

    Nobody as long as all have that much to do. While some have not, one that has is among them where it
    holds some of the prompt: its cost tells if that is worth the wait.
    """
    fits, soon = _room(candidates, demand, hits, ahead_s)
    if not (fits & soon).any():
        return candidates.only(np.zeros(len(candidates), bool))
    for row, _ in candidates.hits(hits):
        soon[row] = True
    return candidates.only(fits & soon)


def _room(candidates: Candidates, demand: Demand, hits: Hits, ahead_s: float) -> tuple[Mask, Mask]:
    """`WorkerView.fits` of each, and whether it would begin soon."""
    card = candidates.card
    if card is None:
        fitting = [view.fits(demand, hits.get(view.key, NO_HIT)) for view in candidates]
        return np.array(fitting), candidates.room[_HASTE] >= -ahead_s
    needed = card.blocks_for(demand.prompt_tokens + demand.expected_tokens * demand.n, demand.n)
    least = card.blocks_for(demand.prompt_tokens + 1)
    wants = Room(demand.n, needed, least, -ahead_s)
    enough = candidates.room >= np.array(wants, float)[:, None]
    fits: Mask = np.logical_and.reduce(enough[:_HASTE])
    for row, hit in candidates.hits(hits):
        # what it holds takes no new memory
        if not fits[row]:
            fits[row] = candidates[row].fits(demand, hit)
    return fits, enough[_HASTE]

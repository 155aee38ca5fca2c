"""Another rank's store of KV blocks in this process: its jobs run when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from decodefleet.worker.kv.tiers.copies import Copies
from decodefleet.worker.kv.tiers.slab_file import SlabForm
from decodefleet.worker.kv.tiers.store import Kind, Outcome, Piece, Store
from decodefleet.worker.kv.tiers.store_opening import open_disk, open_store

Answers = list[tuple[int, Outcome]]


class SecondRank:
    """See `OtherStores`. slabs: its part of the pool. work: runs jobs until something ends."""

    count = 1

    def __init__(
        self,
        slabs: Tensor,
        folder: Path | None,
        threads: Callable[[int], Executor],
        work: Callable[[], bool],
    ) -> None:
        self._slabs = slabs
        self._folder = folder
        self._threads = threads
        self._work = work
        self._orders: list[tuple[int, Kind, Sequence[Piece]]] = []
        self._ended: deque[tuple[int, Outcome]] = deque()
        self._store: Store | None = None

    def open(self, host_slots: int, form: SlabForm | None, number: int) -> str | None:
        copies, disk = Copies(self._slabs), None
        if form is not None and self._folder is not None:
            disk = open_disk(self._folder, replace(form, rank=1), copies, number, self._threads)
            disk.file.load_index()
        self._store = open_store(copies, host_slots, disk, self._threads)
        return None

    def start(self, ticket: int, kind: Kind, pieces: Sequence[Piece]) -> None:
        self._orders.append((ticket, kind, pieces))

    def dispatch(self) -> None:
        assert self._store is not None
        orders, self._orders = self._orders, []
        for ticket, kind, pieces in orders:
            self._store.start(kind, pieces, partial(self._note, ticket))

    def answers(self, timeout_s: float = 0.0) -> Answers:
        while timeout_s and not self._ended and self._work():
            pass
        found = [*self._ended]
        self._ended.clear()
        return found

    def clear(self) -> None:
        assert self._store is not None
        self.dispatch()
        self._store.clear()

    def close_disk(self) -> None:
        assert self._store is not None
        self._store.close_disk()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _note(self, ticket: int, outcome: Outcome) -> None:
        self._ended.append((ticket, outcome))

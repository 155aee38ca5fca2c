"""Requests that no worker can take now. Bounded; per model by priority, then arrival. Places nothing itself.

The order is strict: a request that fits nowhere is not overtaken by smaller ones of its model, or a long
prompt could starve. Models do not wait for each other.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterator

import msgspec

from decodefleet.worker.protocol import Place

from .reservations import RequestKey
from .view import Demand


class Waiter(msgspec.Struct, frozen=True):
    """One request between Place and its answer. deadline: on the scheduler's clock; None for never."""

    key: RequestKey
    place: Place
    demand: Demand
    hashes: tuple[bytes, ...]
    arrived: float
    number: int
    deadline: float | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first; as in vLLM, a lower priority value means earlier."""
        return self.place.priority, self.number


class WaitQueue:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: dict[str, list[Waiter]] = {}
        self._all: dict[RequestKey, Waiter] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._all.values())

    @property
    def full(self) -> bool:
        return len(self._all) >= self._limit

    def get(self, key: RequestKey) -> Waiter | None:
        return self._all.get(key)

    def models(self) -> list[str]:
        return list(self._lines)

    def line(self, model: str) -> tuple[Waiter, ...]:
        """In the order in which they are to be placed."""
        return tuple(self._lines.get(model, ()))

    def push(self, waiter: Waiter) -> None:
        self._all[waiter.key] = waiter
        insort(self._lines.setdefault(waiter.place.model, []), waiter, key=lambda each: each.rank)

    def remove(self, key: RequestKey) -> Waiter | None:
        waiter = self._all.pop(key, None)
        if waiter is not None:
            line = self._lines[waiter.place.model]
            line.remove(waiter)
            if not line:
                del self._lines[waiter.place.model]
        return waiter

    def remove_where(self, condition: Callable[[Waiter], bool]) -> list[Waiter]:
        gone = [waiter for waiter in self._all.values() if condition(waiter)]
        for waiter in gone:
            self.remove(waiter.key)
        return gone

    def remove_router(
        self, router_id: str, keep: Collection[str] = (), arrived_before: float = float("inf")
    ) -> list[Waiter]:
        return self.remove_where(
            lambda waiter: (
                waiter.key.router_id == router_id
                and waiter.key.request_id not in keep
                and waiter.arrived < arrived_before
            )
        )

    def check_integrity(self) -> None:
        """Every waiter stands in exactly one line, in order."""
        lined = [waiter for line in self._lines.values() for waiter in line]
        assert {waiter.key for waiter in lined} == set(self._all)
        assert len(lined) == len(self._all) <= self._limit
        for model, line in self._lines.items():
            assert line, f"an empty line for {model}"
            assert all(waiter.place.model == model for waiter in line)
            assert [w.rank for w in line] == sorted(w.rank for w in line)

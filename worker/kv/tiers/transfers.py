"""Moves of blocks between tiers: begun on all ranks, over when all have ended, taken in by who polls.

What a move touches is handed to it; what its end changes is changed in `then`, in the engine's thread, so
that accounts need no locks. A block that is missing or damaged on one rank is missing on all. Knows nothing
of names, tiers and how ranks are reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from ...engine_api import RankLost
from .store import Kind, Moved, Outcome, Piece, Store

Then = Callable[[Outcome], None]
# of a rank that has been told of copies that others have made
PATIENCE_S = 10.0


class Others(Protocol):
    """The stores of the other ranks. Raises RankLost where one is gone. The engine's thread."""

    count: int

    def start(self, ticket: int, kind: Kind, pieces: Sequence[Piece]) -> None:
        """As `Store.start`, on each; they are told with the next `dispatch`."""

    def dispatch(self) -> None: ...

    def answers(self, timeout_s: float = 0.0) -> Sequence[tuple[int, Outcome]]:
        """(ticket, outcome on one rank) of what has ended; waits up to the timeout for the first of it."""

    def clear(self) -> None:
        """As `Store.clear`, on each."""


class Transfer:
    """A move on its way. parts: ranks that have yet to answer."""

    def __init__(self, then: Then, parts: int) -> None:
        self.then = then
        self.parts = parts
        self.outcome: Outcome | None = None
        self.future: Future[Moved] | None = None

    def note(self, outcome: Outcome) -> None:
        """One rank has ended it."""
        self.parts -= 1
        if self.outcome is None or isinstance(outcome, BaseException):
            self.outcome = outcome
        elif isinstance(self.outcome, Moved):
            ours = self.outcome
            both = [a and b for a, b in zip(ours.arrived, outcome.arrived, strict=True)]
            self.outcome = Moved(both, min(ours.began, outcome.began), max(ours.ended, outcome.ended))


class Transfers:
    """outstanding: moves whose `then` has not run. All methods belong to the engine's thread."""

    def __init__(self, store: Store, others: Others | None = None) -> None:
        self._store = store
        self._others = others
        self._begun = 0
        self._under_way: dict[int, Transfer] = {}
        self._ended: deque[Transfer] = deque()
        # of our own rank, by any thread
        self._answers: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()

    @property
    def outstanding(self) -> int:
        return len(self._under_way) + len(self._ended)

    def start(self, kind: Kind, pieces: Sequence[Piece], then: Then) -> Transfer:
        """Begin a move; `then` gets its outcome (CancelledError is one) when all ranks have ended it."""
        ticket = self._begun
        self._begun += 1
        transfer = Transfer(then, 1 if self._others is None else 1 + self._others.count)
        self._under_way[ticket] = transfer
        if self._others is not None:
            self._others.start(ticket, kind, pieces)
        transfer.future = self._store.start(
            kind, pieces, lambda outcome: self._answers.put((ticket, outcome))
        )
        transfer.future.add_done_callback(
            lambda future: self._answers.put((ticket, CancelledError())) if future.cancelled() else None
        )
        return transfer

    def dispatch(self) -> None:
        """What was begun reaches the other ranks before the next step does."""
        if self._others is not None:
            self._others.dispatch()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in all that has ended; waits up to the timeout for the first of it."""
        self.dispatch()
        self._hear(timeout_s if self.outstanding and not self._ended else 0.0)
        while self._ended:
            transfer = self._ended.popleft()
            assert transfer.outcome is not None
            transfer.then(transfer.outcome)
            self._hear()

    def wait(self, transfer: Transfer, timeout_s: float | None = None) -> None:
        """Until all ranks have ended a move, though it is not taken in, or the time is over on one of them.

        Raises RankLost where no time is given and a rank does not answer.
        """
        self.dispatch()
        if transfer.future is not None:
            with suppress(TimeoutError):
                transfer.future.exception(timeout_s)
        self._hear()
        while transfer.parts and self._others is not None:
            answers = self._others.answers(PATIENCE_S if timeout_s is None else timeout_s)
            self._note(answers)
            if not answers and timeout_s is None:
                raise RankLost("a rank of the model does not answer")
            if not answers:
                return

    def cancel(self, transfer: Transfer) -> bool:
        """Whether a move will not be made: only one that had not begun, and that only we would make."""
        return self._others is None and transfer.future is not None and transfer.future.cancel()

    def clear_files(self) -> None:
        """Raises OSError where our own cannot be cleared."""
        if self._others is not None:
            self._others.clear()
        self._store.clear()

    def _hear(self, timeout_s: float = 0.0) -> None:
        while self._under_way:
            try:
                self._note([self._answers.get(block=timeout_s > 0, timeout=timeout_s or None)])
            except Empty:
                break
            timeout_s = 0.0
        if self._others is not None and self._under_way:
            self._note(self._others.answers())

    def _note(self, answers: Sequence[tuple[int, Outcome]]) -> None:
        for ticket, outcome in answers:
            transfer = self._under_way[ticket]
            transfer.note(outcome)
            if not transfer.parts:
                self._ended.append(self._under_way.pop(ticket))

"""Work in threads whose outcome is taken in by one thread: the engine's, when it polls.

What a job touches is handed to it; what its end changes is changed in `then`, so that accounts need no locks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Jobs:
    """outstanding: jobs whose `then` has not run."""

    def __init__(self) -> None:
        self.outstanding = 0
        self._ended: SimpleQueue[tuple[Any, Callable[[Any], None]]] = SimpleQueue()

    def run(
        self, executor: Executor, job: Callable[[], T], then: Callable[[T | BaseException], None]
    ) -> Future[T]:
        """Start `job`; `then` gets its result, its exception, or CancelledError, in the polling thread."""

        def run() -> T:
            # queued before the future is done: the next poll takes in what anybody has waited for
            try:
                result = job()
            except BaseException as error:
                self._ended.put((error, then))
                raise
            self._ended.put((result, then))
            return result

        def note_cancelled(done: Future[T]) -> None:
            if done.cancelled():
                self._ended.put((CancelledError(), then))

        self.outstanding += 1
        future = executor.submit(run)
        future.add_done_callback(note_cancelled)
        return future

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in all that has ended; waits up to the timeout for the first of it."""
        while self.outstanding:
            try:
                outcome, then = self._ended.get(block=timeout_s > 0, timeout=timeout_s or None)
            except Empty:
                return
            timeout_s = 0.0
            self.outstanding -= 1
            then(outcome)

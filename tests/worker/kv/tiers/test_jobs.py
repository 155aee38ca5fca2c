"""Jobs in threads: their outcomes are taken in by whoever polls, in the order of their ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from threading import Event
from typing import Any

from decodefleet.worker.kv.tiers.jobs import Jobs


class DeafExecutor(Executor):
    """Its futures are done and call nobody back: a thread may well be interrupted between the two."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = _DeafFuture()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except ValueError as error:
            future.set_exception(error)
        return future


class _DeafFuture(Future[Any]):
    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Nobody is called."""


def fail() -> None:
    raise ValueError("no disk")


def test_what_was_waited_for_is_taken_in_by_the_next_poll() -> None:
    jobs, outcomes = Jobs(), list[object]()
    jobs.run(DeafExecutor(), lambda: 5, outcomes.append).result()
    jobs.run(DeafExecutor(), fail, outcomes.append).exception()
    jobs.poll()
    assert outcomes[0] == 5
    assert isinstance(outcomes[1], ValueError)
    assert jobs.outstanding == 0


def test_what_was_cancelled_says_so() -> None:
    jobs, outcomes, release = Jobs(), list[object](), Event()
    with ThreadPoolExecutor(1) as executor:
        jobs.run(executor, release.wait, outcomes.append)
        assert jobs.run(executor, fail, outcomes.append).cancel()
        release.set()
    jobs.poll()
    assert {type(outcome) for outcome in outcomes} == {bool, CancelledError}
    assert jobs.outstanding == 0

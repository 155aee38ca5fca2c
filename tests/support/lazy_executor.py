"""An executor whose jobs run when the test says so, or when somebody waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class LazyExecutor(Executor):
    """hold: keep jobs from now on; before, they run at once. Jobs run in the order of their submission."""

    def __init__(self, _threads: int = 1) -> None:
        self.hold = False
        self._jobs: deque[_LazyFuture] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = _LazyFuture(self, lambda: fn(*args, **kwargs))
        self._jobs.append(future)
        if not self.hold:
            self.run()
        return future

    def begin(self) -> None:
        """All jobs have begun and do not get on: they cannot be cancelled any more."""
        for future in self._jobs:
            future.set_running_or_notify_cancel()

    def forget(self) -> None:
        """Whoever had the jobs hangs."""
        self._jobs.clear()

    def run(self) -> bool:
        """The next job; whether there was one."""
        while self._jobs:
            future = self._jobs.popleft()
            if future.running() or future.set_running_or_notify_cancel():
                try:
                    future.set_result(future.job())
                except Exception as error:
                    future.set_exception(error)
                return True
        return False


class _LazyFuture(Future[Any]):
    def __init__(self, executor: LazyExecutor, job: Callable[[], Any]) -> None:
        super().__init__()
        self.job = job
        self._executor = executor

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait()
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> Any:
        self._wait()
        return super().result(timeout)

    def _wait(self) -> None:
        while not self.done():
            assert self._executor.run()

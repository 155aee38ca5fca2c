"""What the worker's server asks of an engine: the seam between sockets and computation. Torch-free.

`engine.Engine` computes, `fake.FakeEngine` pretends; both are driven by one thread, which calls everything
here but `stats`, and neither knows of sockets, routers or the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .protocol import EventSink, ModelCard, RejectReason, Submit, TokenDelta, WorkerStats

Progress = Callable[[str, float], None]
"""Called while an engine is built: (stage, fraction of it in [0, 1])."""


class Refused(Exception):
    """A request that is well-formed but cannot be taken now; another worker may take it."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(message)
        self.reason: RejectReason = reason
        self.message = message


class RankLost(Exception):
    """A process that the engine computes with died or hangs: no step can be computed any more."""


class EngineLike(Protocol):
    """One model replica. A request is known by (request_id, attempt); attempts are distinct requests."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def total_blocks(self) -> int: ...

    def submit(self, request: Submit) -> None:
        """Take a request. Raises InvalidRequest where it is at fault, Refused where there is no room."""

    def abort(self, request_id: str, attempt: int, index: int | None = None) -> None:
        """Forget a request, or one sequence of it, in any state; unknown ones are ignored."""

    def has_work(self) -> bool: ...

    def step(self) -> list[TokenDelta]:
        """One iteration, blocking. A failure of one request is its delta with finish_reason "error"; an
        exception out of here means that the engine is broken."""

    def stats(self) -> WorkerStats:
        """Cheap, and callable from another thread during a step."""

    def check_integrity(self) -> None:
        """Raises AssertionError where the block accounts do not add up."""

    def close(self) -> None: ...


EngineFactory = Callable[[EventSink, Progress], EngineLike]
"""Builds the engine, reporting progress; news of KV blocks goes to the sink."""

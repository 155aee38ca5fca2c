"""One HTTP request as it is logged and traced: who asked for what, and what became of it.

The middleware makes it and keeps it in the request's state; endpoints add their generations. Knows no HTTP
framework.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.trace import Span

CLIENT_LEFT = "client_left"


@dataclass(slots=True)
class Exchange:
    """route: the path's template. status: None until an answer began. error: the code of a failure, also of
    one inside a stream. span: what tracing began, if it did. began, ended: monotonic seconds.
    """

    request_id: str
    method: str
    route: str = "other"
    status: int | None = None
    error: str | None = None
    timelines: list[Timeline] = field(default_factory=list)
    span: Span | None = None
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    def failed(self, error: Exception, code: str) -> None:
        """The first failure is the one that is told; what still runs of the request ends with it."""
        self.error = self.error or code
        for timeline in self.timelines:
            if timeline.ended is None:
                timeline.failed(error, self.error)

    @property
    def outcome(self) -> str:
        """How it ended in a word: an error's code, why its sequences ended, or that the client left."""
        if self.error is not None:
            return self.error
        if not self.timelines:
            return "ok"
        reasons = {reason for timeline in self.timelines for reason in timeline.finish_reasons}
        if any(not timeline.complete for timeline in self.timelines):
            return CLIENT_LEFT
        return "+".join(sorted(reasons))

"""How long work on model files reports itself. Knows nothing of terminals: those implement the protocol."""

from __future__ import annotations

from typing import Protocol


class ProgressSink(Protocol):
    """Stages follow one another: start, any number of advances, done; an error may end a stage early."""

    def start(self, stage: str, total: int | None) -> None:
        """Begin a stage of `total` units (bytes, for all stages so far); None: not known."""

    def advance(self, n: int) -> None:
        """`n` more units are done."""

    def done(self) -> None:
        """The stage is complete."""


class NoProgress:
    """Reports to nobody."""

    def start(self, stage: str, total: int | None) -> None:
        pass

    def advance(self, n: int) -> None:
        pass

    def done(self) -> None:
        pass

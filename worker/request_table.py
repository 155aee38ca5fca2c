"""Who owns which request in this worker, and which submits are fenced off. Pure bookkeeping, one thread.

Knows incarnation, epochs, attempts and routers; knows nothing of sockets, engines or blocks. A request that
ended is remembered for a while, so that a late duplicate of its Submit starts nothing.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .protocol import Moved, Rejected, RejectReason, Submit, TokenDelta

REMEMBERED = 8192


@dataclass(slots=True)
class Entry:
    """A request that lives here. `live` holds the indices of sequences that have not ended."""

    request_id: str
    attempt: int
    owner: bytes
    live: set[int]
    deadline: float | None = None
    started: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """What to do with a Submit: accept it, refuse it, or neither (a duplicate); end `superseded` first."""

    accept: bool = False
    rejected: Rejected | None = None
    superseded: Entry | None = None


@dataclass(slots=True)
class RequestTable:
    """All requests of one worker process. Times are monotonic seconds."""

    incarnation: str
    epoch: int = 0
    draining: bool = False
    _entries: dict[str, Entry] = field(default_factory=dict)
    _ended: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _deadlines: list[tuple[float, str, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str, attempt: int) -> Entry | None:
        entry = self._entries.get(request_id)
        return entry if entry is not None and entry.attempt == attempt else None

    def owned_by(self, owner: bytes) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.owner == owner]

    def all(self) -> list[Entry]:
        return list(self._entries.values())

    def admit(self, owner: bytes, submit: Submit, now: float) -> Admission:
        """Fence a Submit; an accepted one has its entry when this returns."""
        if submit.incarnation != self.incarnation:
            return Admission(rejected=reject(submit, "incarnation", "the worker has restarted meanwhile"))
        if submit.epoch < self.epoch:
            rejected = reject(submit, "epoch", "placed by a scheduler of the past", epoch=self.epoch)
            return Admission(rejected=rejected)
        self.epoch = submit.epoch
        known = self._entries.get(submit.request_id)
        newest = known.attempt if known is not None else self._ended.get(submit.request_id, -1)
        if submit.attempt <= newest:
            return Admission()
        if self.draining:
            rejected = reject(submit, "draining", "the worker is draining")
            return Admission(rejected=rejected, superseded=known)
        deadline = None if submit.deadline_s is None else now + submit.deadline_s
        self._entries[submit.request_id] = Entry(
            request_id=submit.request_id,
            attempt=submit.attempt,
            owner=owner,
            live=set(submit.live),
            deadline=deadline,
        )
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, submit.request_id, submit.attempt))
        return Admission(accept=True, superseded=known)

    def forget(self, entry: Entry) -> None:
        """The request ended, whichever way. An entry that a newer attempt replaced is left alone."""
        if self._entries.get(entry.request_id) is entry:
            del self._entries[entry.request_id]
            self._ended[entry.request_id] = entry.attempt
            self._ended.move_to_end(entry.request_id)
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def route(self, deltas: Iterable[TokenDelta]) -> dict[bytes, list[TokenDelta]]:
        """Deltas by owner, those of sequences that are gone left out; ended requests are forgotten."""
        routed: dict[bytes, list[TokenDelta]] = {}
        for delta in deltas:
            entry = self.get(delta.request_id, delta.attempt)
            if entry is None or delta.index not in entry.live:
                continue
            entry.started = True
            routed.setdefault(entry.owner, []).append(delta)
            if delta.finish_reason is not None:
                self.end_sequence(entry, delta.index)
        return routed

    def end_sequence(self, entry: Entry, index: int) -> None:
        entry.live.discard(index)
        if not entry.live:
            self.forget(entry)

    def expired(self, now: float) -> list[Entry]:
        """Entries whose deadline passed before their first token; the caller ends them."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, attempt = heapq.heappop(self._deadlines)
            entry = self.get(request_id, attempt)
            if entry is not None and not entry.started:
                late.append(entry)
        return late


def error_deltas(entry: Entry, message: str, moved: Moved | None) -> list[TokenDelta]:
    """The last word on each sequence of a request that the worker gives up."""
    return [
        TokenDelta(
            request_id=entry.request_id,
            attempt=entry.attempt,
            index=index,
            finish_reason="error",
            error=message,
            moved=moved,
        )
        for index in sorted(entry.live)
    ]


def reject(
    submit: Submit, reason: RejectReason, message: str, field_name: str | None = None, *, epoch: int = 0
) -> Rejected:
    return Rejected(
        request_id=submit.request_id,
        attempt=submit.attempt,
        reason=reason,
        message=message,
        field=field_name,
        epoch=epoch,
    )

"""The workers that have registered: who is there, who is fenced, what each reported last.

Fenced (silent, draining, stalled, superseded) differs from overloaded: a fenced worker gets nothing, however
good its cache. Knows nothing of requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from decodefleet.worker.protocol import ModelCard, Register, WorkerStats

from .candidates import Candidates
from .cost import bounded
from .roster import Member as Member
from .roster import Roster
from .view import Load, WorkerKey, WorkerView, reported_load

Fence = Literal["silent", "draining", "stalled"]

# a report may be as old as a heartbeat's interval and the step before it: what was given back since is in it
REPORT_LAG_S = 1.0

# a step that lasts so long, and much longer than predicted, is no long prefill
STALL_MIN_S = 10.0
_REMEMBERED_INCARNATIONS = 64


class Fleet:
    """reserved: what is promised on a worker. sleeps: see `SchedulingConfig`."""

    def __init__(
        self, timeout_s: float, reserved: Callable[[WorkerKey], Load], *, sleeps: bool = False
    ) -> None:
        self._timeout_s, self._reserved, self._sleeps = timeout_s, reserved, sleeps
        self._members: dict[str, Member] = {}
        self._superseded: dict[str, deque[str]] = {}
        self._gone: dict[str, str] = {}
        self._cards: dict[str, ModelCard] = {}
        self._empty_since: dict[str, float] = {}
        self._rosters: dict[str, Roster] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    @property
    def cards(self) -> tuple[ModelCard, ...]:
        """Of every model that was ever offered, the newest card each."""
        return tuple(self._cards.values())

    def card(self, model: str) -> ModelCard | None:
        return self._cards.get(model)

    def keys(self) -> set[WorkerKey]:
        return {member.key for member in self._members.values()}

    def find(self, key: WorkerKey) -> Member | None:
        member = self._members.get(key.worker_id)
        return member if member is not None and member.key == key else None

    def current(self, worker_id: str) -> Member | None:
        return self._members.get(worker_id)

    def superseded(self, key: WorkerKey) -> bool:
        """Whether a later incarnation has taken its place; it must not take it back."""
        return key.incarnation in self._superseded.get(key.worker_id, ())

    def register(self, message: Register, now: float) -> Member:
        """Add or refresh a worker; the caller has removed another incarnation of it before."""
        key = WorkerKey(message.worker_id, message.incarnation)
        member = self.find(key)
        if member is None:
            self._supersede(key)
            member = Member(key, message.endpoint, message.card, message.stats, now, now)
            self._members[key.worker_id] = member
        member.endpoint, member.card = message.endpoint, message.card
        member.peer_endpoint = message.peer_endpoint
        self._rosters.clear()
        self._cards[message.card.name] = message.card
        self._empty_since.pop(message.card.name, None)
        return member

    def report(self, member: Member, stats: WorkerStats, now: float) -> None:
        fenced = self.fence(member, now)
        member.stats = stats
        member.last_heartbeat = now
        if fenced != self.fence(member, now):
            self._rosters.clear()
        while member.settling and member.settling[0][0] < now - REPORT_LAG_S:
            member.settling.popleft()
        known = sum((load for _, load in member.settling), start=self._reserved(member.key))
        member.foreign = reported_load(stats).beyond(known)
        self._changed(member)

    def remove(self, key: WorkerKey, now: float) -> None:
        """It may come back as it was, unless another incarnation of it registers first."""
        member = self._members.pop(key.worker_id)
        self._rosters.clear()
        self._gone[key.worker_id] = key.incarnation
        if not any(other.card.name == member.card.name for other in self._members.values()):
            self._empty_since[member.card.name] = now

    def empty_since(self, model: str) -> float:
        """When the last worker of a model went; minus infinity while there is one or never was."""
        return self._empty_since.get(model, float("-inf"))

    def fence(self, member: Member, now: float) -> Fence | None:
        if now - member.last_heartbeat > self._timeout_s:
            return "silent"
        if member.stats.draining:
            return "draining"
        return "stalled" if member.stats.overdue(STALL_MIN_S) else None

    def silent(self, now: float) -> list[Member]:
        return [member for member in self._members.values() if self.fence(member, now) == "silent"]

    def serving(self, model: str, now: float) -> Sequence[Member]:
        """Workers of a model that are not fenced."""
        return self._roster(model, now).members

    def candidates(self, model: str, now: float) -> Candidates:
        """The same as candidates; there must be some."""
        return self._roster(model, now).candidates()

    def _roster(self, model: str, now: float) -> Roster:
        roster = self._rosters.get(model)
        # what a report does not change, silence may
        if roster is None or now - roster.heard > self._timeout_s:
            roster = self._rosters[model] = Roster(
                [
                    member
                    for member in self._members.values()
                    if member.card.name == model and self.fence(member, now) is None
                ],
                self.view,
            )
        return roster

    def ready(self, now: float) -> tuple[str, ...]:
        """Models of which some worker can generate, or will once it is asked."""
        return tuple(name for name in self._cards if self._sleeps or self.serving(name, now))

    def view(self, member: Member) -> WorkerView:
        """Cached until the next report, or change of its reservations."""
        if member.view is None:
            member.view = WorkerView(
                key=member.key,
                endpoint=member.endpoint,
                card=member.card,
                stats=member.stats,
                load=self._reserved(member.key) + member.foreign,
                step_time=bounded(member.stats.step_time),
                last_heartbeat=member.last_heartbeat,
                last_placed=member.last_placed,
            )
        return member.view

    def placed(self, key: WorkerKey, number: int) -> None:
        """Placement `number` went there."""
        member = self.find(key)
        if member is not None:
            member.last_placed = number
            self._changed(member)

    def ended(self, key: WorkerKey, load: Load, now: float) -> None:
        """A request's reservation was given back because it ended there."""
        member = self.find(key)
        if member is not None:
            member.settling.append((now, load))
            self._changed(member)

    def touch(self, key: WorkerKey) -> None:
        """A worker's reservations changed."""
        member = self.find(key)
        if member is not None:
            self._changed(member)

    def _changed(self, member: Member) -> None:
        member.view = None
        roster = self._rosters.get(member.card.name)
        if roster is not None:
            roster.changed(member.key)

    def _supersede(self, key: WorkerKey) -> None:
        gone = self._gone.pop(key.worker_id, None)
        if gone is not None and gone != key.incarnation:
            remembered = self._superseded.setdefault(key.worker_id, deque(maxlen=_REMEMBERED_INCARNATIONS))
            remembered.append(gone)

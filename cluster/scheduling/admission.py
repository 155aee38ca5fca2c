"""Whether a request is placed now, waits, or is refused, and when those that wait get their turn.

Owns the queue, what is learned of lengths and pace, and the count of refusals. Which worker is the placer's
choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from decodefleet.worker.protocol import Place, Refusal, RefusalReason

from . import refusals
from .decisions import Decision
from .fleet import Member
from .lengths import OutputLengths
from .outgoing import Outgoing
from .placer import Placer
from .prefix_index import unpack_hashes
from .queue import Waiter, WaitQueue
from .refusals import Refused
from .reservations import RequestKey, Reservation
from .view import Demand


class Admission:
    def __init__(self, placer: Placer) -> None:
        self.queue = WaitQueue(placer.config.max_queue)
        self.refused: Counter[RefusalReason] = Counter()
        self._placer = placer
        self._fleet = placer.fleet
        self._config = placer.config
        self._lengths = OutputLengths()
        self._retry = refusals.RetryAdvice()
        self._arrivals = 0

    def admit(self, key: RequestKey, request: Place, now: float) -> list[Outgoing]:
        """Place at once, let wait, or refuse."""
        waiter = self._waiter(key, request, now)
        model = request.model
        card = self._fleet.card(model)
        if card is None:
            # before the first worker registers nobody can say which models there are
            if self._fleet.cards:
                return [self._refuse(waiter, refusals.unknown_model(model), now)]
        elif refused := refusals.too_long(waiter.demand, card):
            return [self._refuse(waiter, refused, now)]
        serving = self._fleet.serving(model, now)
        if not self._stands_behind(waiter, serving, now):
            placement = self._placer.place(waiter, self._allowed(waiter, serving, now), now)
            if placement is not None:
                return [Outgoing(key.router_id, placement)]
        if card and (refused := refusals.too_large(waiter.demand, card, serving)):
            return [self._refuse(waiter, refused, now)]
        if self.queue.full:
            waiting = len(self.queue)
            return [self._refuse(waiter, refusals.queue_full(waiting, self._retry.after(waiting)), now)]
        self.queue.push(waiter)
        return []

    def drain(self, now: float) -> list[Outgoing]:
        """Place what waits, in order, as far as there is room."""
        outgoing = []
        for model in self.queue.models():
            serving = self._fleet.serving(model, now)
            for waiter in self.queue.line(model) if serving else ():
                allowed = self._allowed(waiter, serving, now)
                placement = self._placer.place(waiter, allowed, now)
                if placement is not None:
                    self.queue.remove(waiter.key)
                    outgoing.append(Outgoing(waiter.key.router_id, placement))
                elif allowed:
                    break
        return outgoing

    def ended(self, held: Reservation, generated: int, now: float) -> None:
        """A placed request is done: what it teaches of lengths and of the pace."""
        self._lengths.observe(held.model, generated, held.n)
        self._retry.released(now)

    def refuse_overdue(self, now: float) -> list[Outgoing]:
        grace = self._config.no_worker_grace_s
        away = {model for model in self.queue.models() if not self._fleet.serving(model, now)}
        outgoing = []
        for waiter in tuple(self.queue):
            model = waiter.place.model
            waits_from = max(waiter.arrived, self._fleet.empty_since(model))
            if waiter.deadline is not None and now >= waiter.deadline:
                refused = refusals.deadline_passed(now - waiter.arrived)
            elif model in away and now - waits_from >= grace:
                known = self._fleet.card(model) is not None or not self._fleet.cards
                refused = refusals.no_worker(model, grace) if known else refusals.unknown_model(model)
            else:
                continue
            self.queue.remove(waiter.key)
            outgoing.append(self._refuse(waiter, refused, now))
        return outgoing

    def _waiter(self, key: RequestKey, request: Place, now: float) -> Waiter:
        self._arrivals += 1
        n = max(1, request.n)
        return Waiter(
            key=key,
            place=request,
            demand=Demand(
                model=request.model,
                prompt_tokens=max(1, request.prompt_tokens),
                expected_tokens=self._lengths.expected(request.model, request.max_new_tokens, n),
                n=n,
            ),
            hashes=unpack_hashes(request.block_hashes),
            arrived=now,
            number=self._arrivals,
            deadline=None if request.deadline_s is None else now + request.deadline_s,
        )

    def _stands_behind(self, waiter: Waiter, serving: Sequence[Member], now: float) -> bool:
        """Whether somebody waits who comes first; who only waits out an exclusion holds up nobody."""
        ahead = takewhile(lambda other: other.rank < waiter.rank, self.queue.line(waiter.place.model))
        return any(self._allowed(other, serving, now) for other in ahead)

    def _allowed(self, waiter: Waiter, serving: Sequence[Member], now: float) -> Sequence[Member]:
        """Workers that failed this request are left out until they have restarted or proved to be alive."""
        exclude = waiter.place.exclude
        if not exclude or now - waiter.arrived > self._config.worker_timeout_s:
            return serving
        return [
            member
            for member in serving
            if member.key.worker_id not in exclude or member.registered_at > waiter.arrived
        ]

    def _refuse(self, waiter: Waiter, refused: Refused, now: float) -> Outgoing:
        self.refused[refused.reason] += 1
        policy = self._placer.policy.name
        self._placer.log.add(Decision.on(waiter, now, policy, refused=refused.reason))
        message = Refusal(
            request_id=waiter.key.request_id,
            attempt=waiter.place.attempt,
            reason=refused.reason,
            message=refused.message,
            retry_after_s=refused.retry_after_s,
        )
        return Outgoing(waiter.key.router_id, message)

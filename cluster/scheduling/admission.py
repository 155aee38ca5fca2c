"""Whether a request is placed now, waits, or is refused, and when those that wait get their turn.

Owns the queue, what is learned of lengths and pace, and the count of refusals. Which worker is the placer's
choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from decodefleet.worker.protocol import Place, Refusal, RefusalReason

from . import refusals
from .chain import Chain
from .decisions import Decision
from .fleet import Member
from .headroom import kept_free
from .lengths import OutputLengths
from .outgoing import Outgoing
from .pace import Pace, turns_until
from .placer import Placer
from .queue import Waiter, WaitQueue
from .refusals import Refused
from .reservations import RequestKey, Reservation
from .view import Demand

Obstacle = Literal["excluded", "over_share", "no_room"]


class Admission:
    def __init__(self, placer: Placer) -> None:
        config = placer.config
        self.queue = WaitQueue(config.max_queue)
        self.refused: Counter[RefusalReason] = Counter()
        self._placer = placer
        self._fleet = placer.fleet
        self._config = config
        self._lengths = OutputLengths()
        self._pace: dict[str, Pace] = {}
        self._arrivals = 0
        # why waiters (by number) could not be placed since room last grew: to try again would be in vain
        self._tried: dict[int, Obstacle] = {}

    def admit(self, key: RequestKey, request: Place, now: float) -> list[Outgoing]:
        """Place at once, let wait, or refuse."""
        waiter = self._waiter(key, request, now)
        if refused := self._never(waiter):
            return [self._refuse(waiter, refused, now)]
        share = self.queue.share(request.model)
        share.asks(request.tenant, waiter.demand.n, now, request.tenant_weight)
        if not self.queue.classes(request.model) and (answer := self._at_once(waiter, now)):
            return [answer]
        self.queue.push(waiter)
        outgoing = self._take_turns(request.model, now)
        if self.queue.get(key) is waiter:
            outgoing += self._bound(waiter, now)
        self._keep_pace(request.model, now)
        return outgoing

    def drain(self, now: float) -> list[Outgoing]:
        """Something has changed: place what waits, in order, as far as there is room."""
        self._tried.clear()
        outgoing: list[Outgoing] = []
        for model in self.queue.models():
            outgoing += self._take_turns(model, now)
        for model in {*self._pace, *self.queue.models()}:
            self._keep_pace(model, now)
        return outgoing

    def ended(self, held: Reservation, generated: int) -> None:
        """A placed request is done: what it teaches of lengths, and what its tenant really got."""
        demand = held.demand
        self._lengths.observe(demand.model, generated, demand.n)
        surplus = max(0, generated) - demand.expected_tokens * demand.n
        self.queue.share(demand.model).correct(held.tenant, self._config.decode_token_weight * surplus)

    def lost(self, dropped: Iterable[Reservation]) -> None:
        """Placed requests were lost: nobody pays for what another worker has to do again."""
        for held in dropped:
            self.queue.share(held.demand.model).correct(held.tenant, -self._charge(held))

    def tick(self, now: float) -> list[Outgoing]:
        """Refuse who has waited too long."""
        self.queue.forget_idle(now)
        away = {model for model in self.queue.models() if not self._fleet.serving(model, now)}
        outgoing = []
        for waiter in tuple(self.queue):
            refused = self._overdue(waiter, waiter.place.model in away, now)
            if refused is not None:
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
            chain=Chain(request.block_hashes),
            arrived=now,
            number=self._arrivals,
            deadline=None if request.deadline_s is None else now + request.deadline_s,
            resumed=request.emitted > 0,
        )

    def _never(self, waiter: Waiter) -> Refused | None:
        """Why it can never be served, whatever the workers do."""
        card = self._fleet.card(waiter.place.model)
        if card is None:
            # before the first worker registers nobody can say which models there are
            return refusals.unknown_model(waiter.place.model) if self._fleet.cards else None
        if waiter.deadline is not None and waiter.deadline <= waiter.arrived:
            return refusals.deadline_passed(0.0)
        return refusals.too_long(waiter.demand, card)

    def _bound(self, waiter: Waiter, now: float) -> list[Outgoing]:
        """Keep the queue within its bounds of time and number, now that one more waits."""
        if refused := self._unwelcome(waiter, now):
            yields = waiter
        elif self.queue.full(waiter.place.model) and not waiter.resumed:
            yields = self.queue.who_yields(waiter)
            refused = refusals.queue_full(self.queue.limit, self._wait_s(yields, now))
        else:
            return []
        self.queue.remove(yields.key)
        return [self._refuse(yields, refused, now)]

    def _unwelcome(self, waiter: Waiter, now: float) -> Refused | None:
        """Why a request that has just joined the queue shall not stay there."""
        model = waiter.place.model
        card = self._fleet.card(model)
        if card and (refused := refusals.too_large(waiter.demand, card, self._fleet.serving(model, now))):
            return refused
        # what was begun is brought to its end; there are never more of these than ran at once
        if waiter.resumed:
            return None
        wait_s, limit_s = self._wait_s(waiter, now), self._config.max_queue_wait_s
        if waiter.deadline is not None:
            limit_s = min(limit_s, waiter.deadline - now)
        return refusals.long_wait(wait_s, limit_s) if wait_s > limit_s else None

    def _wait_s(self, waiter: Waiter, now: float) -> float:
        """Predicted from its place in the order and the pace at which others were placed."""
        pace = self._pace.get(waiter.place.model)
        return turns_until(waiter, self.queue) * pace.interval_s(now) if pace is not None else 0.0

    def _at_once(self, waiter: Waiter, now: float) -> Outgoing | None:
        """Where nobody waits it is everybody's turn."""
        place = waiter.place
        serving = self._fleet.serving(place.model, now)
        if not serving:
            return None
        answer = self._try(waiter, serving, now)
        if isinstance(answer, Outgoing):
            return answer
        self._tried[waiter.number] = answer
        return None

    def _take_turns(self, model: str, now: float) -> list[Outgoing]:
        """Place who is next until somebody who is has no room.

        Who only waits out an exclusion, or stands back for tenants with less than their share, holds up
        nobody; everybody else is overtaken by none of his model.
        """
        outgoing: list[Outgoing] = []
        serving = self._fleet.serving(model, now)
        passed: set[RequestKey] = set()
        held_back: set[str] = set()
        while serving and (waiter := self.queue.next(model, passed, held_back)) is not None:
            answer = self._tried.get(waiter.number) or self._try(waiter, serving, now)
            if isinstance(answer, Outgoing):
                outgoing.append(answer)
                continue
            self._tried[waiter.number] = answer
            if answer == "excluded":
                passed.add(waiter.key)
            elif answer == "over_share":
                held_back.add(waiter.place.tenant)
            else:
                break
        return outgoing

    def _try(self, waiter: Waiter, serving: Sequence[Member], now: float) -> Outgoing | Obstacle:
        """Place or refuse for good, taking it out of the queue, or say what is in the way."""
        allowed = self._allowed(waiter, serving, now)
        if not allowed:
            return "excluded"
        if self._stands_back(waiter, allowed, now):
            return "over_share"
        answer = self._placer.place(waiter, allowed, now)
        if answer is None:
            return "no_room" if self._claims(waiter, now) is None else "over_share"
        self.queue.remove(waiter.key)
        if isinstance(answer, Refused):
            return self._refuse(waiter, answer, now)
        self.queue.share(waiter.place.model).served(waiter.place.tenant, self._charge(answer))
        if (pace := self._pace.get(waiter.place.model)) is not None:
            pace.moved(now)
        return Outgoing(waiter.key.router_id, answer.placement)

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

    def _stands_back(self, waiter: Waiter, allowed: Sequence[Member], now: float) -> bool:
        """Whether what is free is kept for tenants with less than this one."""
        config, model, n = self._config, waiter.place.model, waiter.demand.n
        if not config.late_binding or not self.queue.share(model).shared(now):
            return False
        free = self._placer.free_sequences(allowed, waiter.demand)
        places = free + self._placer.ledger.sequences(model).total()
        if free - n >= round(config.tenant_headroom * places):
            return False
        claims = self._claims(waiter, now)
        if claims is None:
            return False
        pace = self._pace.get(model)
        interval_s = 0.0 if pace is None else pace.interval_s(now)
        step_s = self._placer.step_s(allowed)
        return free - n < kept_free(claims, step_s, interval_s, places, config.tenant_headroom)

    def _claims(self, waiter: Waiter, now: float) -> float | None:
        place = waiter.place
        running = self._placer.ledger.sequences(place.model)
        return self.queue.share(place.model).claims(place.tenant, running, now)

    def _charge(self, held: Reservation) -> float:
        """Weighted tokens that a placement is expected to take."""
        demand = held.demand
        uncached = demand.prompt_tokens - held.placement.cached_tokens
        return uncached + self._config.decode_token_weight * demand.expected_tokens * demand.n

    def _keep_pace(self, model: str, now: float) -> None:
        """Run the clock of a model's queue while somebody waits for workers that are there."""
        if self.queue.classes(model) and self._fleet.serving(model, now):
            running = self._placer.ledger.requests(model)
            self._pace.setdefault(model, Pace()).waits(now, running)
        elif (pace := self._pace.get(model)) is not None:
            pace.rests(now)

    def _overdue(self, waiter: Waiter, away: bool, now: float) -> Refused | None:
        if waiter.deadline is not None and now >= waiter.deadline:
            return refusals.deadline_passed(now - waiter.arrived)
        grace, model = self._config.no_worker_grace_s, waiter.place.model
        if away and now - max(waiter.arrived, self._fleet.empty_since(model)) >= grace:
            known = self._fleet.card(model) is not None or not self._fleet.cards
            return refusals.no_worker(model, grace) if known else refusals.unknown_model(model)
        return None

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

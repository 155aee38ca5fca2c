"""The router's line to the global scheduler: placements, releases, and which models are served.

Asks an injected `locate` where the scheduler is, at start and after each loss; then says Hello once a
second, which is answered, and so is its life sign. Placements that wait when a scheduler is lost are asked
for again at the next one; while there is none, or none that knows the workers, the last snapshot stands in.
Every message of ours may be lost: the ids in RouterReport repair that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
import zmq.asyncio

from decodefleet.worker.protocol import (
    Fenced,
    FromScheduler,
    Hello,
    ModelCard,
    Place,
    Placement,
    Refusal,
    Release,
    RouterCounts,
    RouterReport,
    Started,
    ToScheduler,
    Welcome,
)
from decodefleet.worker.transport import Codec, PeerUnreachable, Security

from ..tasks import end
from .connection import Connection
from .errors import PlacementRefused, SchedulerSilent
from .last_snapshot import LastSnapshot, Life

log = logging.getLogger(__name__)

Locate = Callable[[], Awaitable[tuple[str, int]]]
"""Where the scheduler is: (endpoint, epoch)."""

LOCATE_TIMEOUT_S = 5.0
REPORT_S = 1.0
SILENCE_S = 3.0
RETRY_S = 0.3
# the scheduler answers a deadline itself; this much later nobody will
DEADLINE_GRACE_S = 3.0
# without a scheduler for so long requests are placed by the last snapshot; for so much longer on full workers
AWAY_S = 0.5
CROWD_S = 10.0
# after this a new scheduler that knows no workers is believed
YOUNG_S = 10.0
# a worker that could not be reached is not asked for so long, unless it starts again meanwhile
SUSPECT_S = 5.0

Key = tuple[str, int]


class SchedulerClient:
    """One router's view of the scheduler. `start` before use, `close` after."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        router_id: str,
        locate: Locate,
        security: Security | None,
        metrics: Callable[[], str],
        counts: Callable[[], RouterCounts | None] = lambda: None,
        on_models: Callable[[Sequence[ModelCard]], None] = lambda _cards: None,
        on_fenced: Callable[[Sequence[Fenced]], None] = lambda _fenced: None,
        on_stand_in: Callable[[], None] = lambda: None,
    ) -> None:
        self.epoch = 0
        self.snapshot = LastSnapshot()
        self._context = context
        self._router_id = router_id
        self._locate = locate
        self._security = security
        self._metrics = metrics
        self._counts = counts
        self._on_models = on_models
        self._on_fenced = on_fenced
        self._on_stand_in = on_stand_in
        self._codec: Codec[FromScheduler] = Codec(FromScheduler)
        self._connection: Connection[FromScheduler] | None = None
        self._models: dict[str, ModelCard] = {}
        self._ready: frozenset[str] = frozenset()
        self._pending: dict[Key, tuple[Place, asyncio.Future[Placement]]] = {}
        self._live: dict[str, None] = {}
        self._heard = 0.0
        self._followed_at = 0.0
        # since when no scheduler that knows the workers has been there
        self._absent_since: float | None = None
        self._stand_in: asyncio.TimerHandle | None = None
        self._newest_epoch = 0
        self._suspects: dict[Life, float] = {}
        self._lost = asyncio.Event()
        # as far as the scheduler has heard of them
        self.routers = 1
        # set once a model is known
        self.introduced = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def models(self) -> Mapping[str, ModelCard]:
        return self._models

    @property
    def open_requests(self) -> int:
        """Placed or waiting to be."""
        return len(self._live)

    @property
    def ready(self) -> frozenset[str]:
        """Names of models of which some worker can generate, as far as is known."""
        return self._ready if self._absent_since is None else self.snapshot.models

    def start(self) -> None:
        self._miss()
        self._task = asyncio.create_task(self._keep_connected())

    def check_health(self) -> None:
        """Raises RuntimeError where nobody keeps the line to the scheduler: no request would be placed."""
        if self._task is None:
            raise RuntimeError("the line to the scheduler was not opened")
        if self._task.done():
            error = None if self._task.cancelled() else self._task.exception()
            raise RuntimeError("the line to the scheduler has ended") from error

    async def close(self) -> None:
        if self._stand_in is not None:
            self._stand_in.cancel()
        if self._task is not None:
            await end(self._task)
        if self._connection is not None:
            self._connection.close(linger_ms=500)

    async def place(self, place: Place) -> Placement:
        """A worker for the request, reserved until `release`; `release` in every case, this failing too.

        Without a scheduler it is the last snapshot's, and nothing is reserved. Raises PlacementRefused, or
        SchedulerSilent when nobody answers in time.
        """
        self._live[place.request_id] = None
        if self._suspects:
            place = self._without_suspects(place)
        placement = self._by_snapshot(place) or await self._by_scheduler(place)
        self.snapshot.placed(place, placement.worker_id)
        return placement

    def started(self, request_id: str, attempt: int) -> None:
        self._send(Started(request_id=request_id, attempt=attempt))

    def release(self, request_id: str, attempt: int, generated: int, *, last: bool = True) -> None:
        """Idempotent. `last`: the request will not ask for another placement."""
        self.snapshot.released(request_id)
        if last:
            self._live.pop(request_id, None)
        self._send(Release(request_id=request_id, attempt=attempt, generated=generated))

    def suspect(self, life: Life) -> None:
        """We cannot reach this worker, whatever the scheduler says of it."""
        self.snapshot.lose(life)
        self._suspects[life] = asyncio.get_running_loop().time()

    def outdated(self, epoch: int) -> None:
        """A worker obeys the scheduler of this epoch: an older one's word is worth nothing any more."""
        self._newest_epoch = max(self._newest_epoch, epoch)
        if self.epoch < self._newest_epoch:
            self._lost.set()

    def _without_suspects(self, place: Place) -> Place:
        now = asyncio.get_running_loop().time()
        self._suspects = {life: at for life, at in self._suspects.items() if now - at < SUSPECT_S}
        anew = {worker_id for worker_id, _ in self.snapshot.lives - self._suspects.keys()}
        avoided = {worker_id for worker_id, _ in self._suspects} - anew
        if avoided <= {*place.exclude}:
            return place
        return msgspec.structs.replace(place, exclude=tuple(avoided.union(place.exclude)))

    def _by_snapshot(self, place: Place) -> Placement | None:
        absent_s = self._absent_s()
        if absent_s < AWAY_S:
            return None
        epoch = max(self.epoch, self._newest_epoch)
        placement = self.snapshot.choose(place, epoch, crowd=absent_s > CROWD_S)
        if placement is not None:
            self._on_stand_in()
        return placement

    async def _by_scheduler(self, place: Place) -> Placement:
        key = (place.request_id, place.attempt)
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        self._pending[key] = (place, future)
        self._send(place)
        limit = None if place.deadline_s is None else place.deadline_s + DEADLINE_GRACE_S
        try:
            async with asyncio.timeout(limit):
                return await future
        except TimeoutError:
            raise SchedulerSilent("no scheduler answered in time") from None
        finally:
            del self._pending[key]

    def _send(self, message: ToScheduler) -> None:
        if self._connection is None:
            return
        with contextlib.suppress(PeerUnreachable):
            self._connection.send(message)

    async def _keep_connected(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOCATE_TIMEOUT_S):
                    endpoint, epoch = await self._locate()
            except Exception as error:
                log.warning("cannot find out where the scheduler is, trying again: %r", error)
                await asyncio.sleep(RETRY_S)
                continue
            if epoch < max(self.epoch, self._newest_epoch):
                await asyncio.sleep(RETRY_S)
                continue
            self.epoch = epoch
            await self._follow(endpoint)
            self._miss()
            await asyncio.sleep(RETRY_S)

    async def _follow(self, endpoint: str) -> None:
        """Talk to one scheduler until it is lost."""
        loop = asyncio.get_running_loop()
        self._lost.clear()
        self._heard = self._followed_at = loop.time()
        self._connection = Connection(
            self._context,
            endpoint,
            self._security,
            self._router_id,
            self._codec,
            self._on_message,
            lambda _reason: self._lost.set(),
        )
        self._report()
        for place, _ in self._pending.values():
            self._send(place)
        try:
            while not self._lost.is_set() and loop.time() - self._heard < SILENCE_S:
                try:
                    async with asyncio.timeout(REPORT_S):
                        await self._lost.wait()
                except TimeoutError:
                    self._report()
            log.warning("scheduler at %s lost", endpoint)
        finally:
            self._connection.close(linger_ms=500)
            self._connection = None

    def _report(self) -> None:
        self._send(
            RouterReport(
                router_id=self._router_id,
                metrics=self._metrics(),
                live=tuple(self._live),
                counts=self._counts(),
            )
        )
        self._send(Hello(router_id=self._router_id))

    def _on_message(self, message: FromScheduler) -> None:
        self._heard = asyncio.get_running_loop().time()
        if isinstance(message, Welcome):
            self._welcomed(message)
        elif isinstance(message, Placement | Refusal):
            self._settle(message)

    def _welcomed(self, welcome: Welcome) -> None:
        young = self._heard - self._followed_at < YOUNG_S
        models = {card.name: card for card in welcome.models}
        if self.snapshot.note(welcome, believe=not young):
            self._absent_since = None
            self._models = models
        else:
            # one that has only just begun does not know all of them
            self._models |= models
        if self._models:
            self.introduced.set()
        self.routers = max(1, welcome.routers)
        self._ready = frozenset(welcome.ready)
        self._on_models(welcome.models)
        self._on_fenced(welcome.fenced)

    def _miss(self) -> None:
        """There is no scheduler, from now on."""
        if self._absent_since is None:
            loop = asyncio.get_running_loop()
            self._absent_since = loop.time()
            if self._stand_in is not None:
                self._stand_in.cancel()
            self._stand_in = loop.call_later(AWAY_S, self._stand_in_for_it)

    def _absent_s(self) -> float:
        since = self._absent_since
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    def _stand_in_for_it(self) -> None:
        """Place what waits, as far as the last snapshot allows, until there is a scheduler again."""
        if self._absent_since is None:
            return
        for place, future in self._pending.values():
            if not future.done() and (placement := self._by_snapshot(place)) is not None:
                future.set_result(placement)
                # at once: the next one is to see it
                self.snapshot.placed(place, placement.worker_id)
                # where a new scheduler has it waiting already
                self._send(Release(request_id=place.request_id, attempt=place.attempt))
        self._stand_in = asyncio.get_running_loop().call_later(RETRY_S, self._stand_in_for_it)

    def _settle(self, answer: Placement | Refusal) -> None:
        _, future = self._pending.get((answer.request_id, answer.attempt), (None, None))
        if future is None or future.done():
            return
        if isinstance(answer, Placement):
            future.set_result(answer)
        else:
            future.set_exception(PlacementRefused(answer))

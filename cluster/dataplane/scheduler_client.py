"""The router's line to the global scheduler: placements, releases, and which models are served.

Asks an injected `locate` where the scheduler is, at start and after each loss; then says Hello once a
second, which is answered, and so is its life sign. Placements that wait when a scheduler is lost are asked
for again at the next one. Every message of ours may be lost: the ids in RouterReport repair that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import zmq.asyncio

from decodefleet.worker.protocol import (
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

from .connection import Connection
from .errors import PlacementRefused, SchedulerSilent

log = logging.getLogger(__name__)

Locate = Callable[[], Awaitable[tuple[str, int]]]
"""Where the scheduler is: (endpoint, epoch)."""

REPORT_S = 1.0
SILENCE_S = 3.0
RETRY_S = 0.3
# the scheduler answers a deadline itself; this much later nobody will
DEADLINE_GRACE_S = 3.0

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
    ) -> None:
        self.epoch = 0
        self._context = context
        self._router_id = router_id
        self._locate = locate
        self._security = security
        self._metrics = metrics
        self._counts = counts
        self._on_models = on_models
        self._codec: Codec[FromScheduler] = Codec(FromScheduler)
        self._connection: Connection[FromScheduler] | None = None
        self._models: dict[str, ModelCard] = {}
        self._ready: frozenset[str] = frozenset()
        self._pending: dict[Key, tuple[Place, asyncio.Future[Placement]]] = {}
        self._live: dict[str, None] = {}
        self._heard = 0.0
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def models(self) -> Mapping[str, ModelCard]:
        return self._models

    @property
    def ready(self) -> frozenset[str]:
        """Names of models of which some worker can generate; empty while the scheduler is away."""
        return self._ready

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_connected())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._connection is not None:
            self._connection.close(linger_ms=500)

    async def place(self, place: Place) -> Placement:
        """A worker for the request, reserved until `release`; `release` in every case, this failing too.

        Raises PlacementRefused, or SchedulerSilent when nobody answers in time.
        """
        key = (place.request_id, place.attempt)
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        self._pending[key] = (place, future)
        self._live[place.request_id] = None
        self._send(place)
        limit = None if place.deadline_s is None else place.deadline_s + DEADLINE_GRACE_S
        try:
            async with asyncio.timeout(limit):
                return await future
        except TimeoutError:
            raise SchedulerSilent("no scheduler answered in time") from None
        finally:
            del self._pending[key]

    def started(self, request_id: str, attempt: int) -> None:
        self._send(Started(request_id=request_id, attempt=attempt))

    def release(self, request_id: str, attempt: int, generated: int, *, last: bool = True) -> None:
        """Idempotent. `last`: the request will not ask for another placement."""
        if last:
            self._live.pop(request_id, None)
        self._send(Release(request_id=request_id, attempt=attempt, generated=generated))

    def _send(self, message: ToScheduler) -> None:
        if self._connection is None:
            return
        with contextlib.suppress(PeerUnreachable):
            self._connection.send(message)

    async def _keep_connected(self) -> None:
        while True:
            try:
                endpoint, epoch = await self._locate()
            except Exception:
                log.exception("cannot find out where the scheduler is; trying again")
                await asyncio.sleep(RETRY_S)
                continue
            if epoch < self.epoch:
                await asyncio.sleep(RETRY_S)
                continue
            self.epoch = epoch
            await self._follow(endpoint)
            self._ready = frozenset()
            await asyncio.sleep(RETRY_S)

    async def _follow(self, endpoint: str) -> None:
        """Talk to one scheduler until it is lost."""
        loop = asyncio.get_running_loop()
        self._lost.clear()
        self._heard = loop.time()
        self._connection = Connection(
            self._context,
            endpoint,
            self._security,
            self._router_id,
            self._codec,
            self._on_message,
            lambda _reason: self._lost.set(),
        )
        self._send(Hello(router_id=self._router_id))
        for place, _ in self._pending.values():
            self._send(place)
        try:
            while not self._lost.is_set() and loop.time() - self._heard < SILENCE_S:
                self._report()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_S):
                        await self._lost.wait()
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
            self._models = {card.name: card for card in message.models}
            self._ready = frozenset(message.ready)
            self._on_models(message.models)
        elif isinstance(message, Placement | Refusal):
            self._settle(message)

    def _settle(self, answer: Placement | Refusal) -> None:
        _, future = self._pending.get((answer.request_id, answer.attempt), (None, None))
        if future is None or future.done():
            return
        if isinstance(answer, Placement):
            future.set_result(answer)
        else:
            future.set_exception(PlacementRefused(answer))

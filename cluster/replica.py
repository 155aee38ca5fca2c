"""Supervisor of one worker: keeps a rank process alive, ready and known to the rest of the cluster.

Torch-free, and free of Ray too: `app.py` makes a Serve replica of it. Each life of the rank process is a new
incarnation; its news of KV blocks goes to the directory, its losses of the scheduler are answered with the
scheduler's new address. It never sees a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from decodefleet.worker.assets.resolve import ResolvedModel, resolve_model
from decodefleet.worker.config import WorkerConfig
from decodefleet.worker.protocol import (
    Attach,
    Drain,
    Failed,
    Heartbeat,
    KvEvents,
    Loading,
    ModelCard,
    Ready,
    SchedulerLost,
    Shutdown,
    ToSupervisor,
    WorkerStats,
)
from decodefleet.worker.transport import PeerUnreachable, Security

from .config import ServeConfig
from .news import NewsSender
from .observability.worker_metrics import worker_text
from .rank_process import RankProcess, rank_environment

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0
STABLE_S = 60.0
LOCATE_TIMEOUT_S = 5.0
LOCATE_RETRY_S = 0.5
SHUTDOWN_S = 5.0
# after streams were sent to other workers
LENDING_S = 2.0
WATCH_S = 1.0
# heartbeats come from a thread that goes on during a step: such a silence is no long prefill
SILENCE_S = 20.0
# a step that lasts so long, and many times what was predicted, will not end any more
HANG_S = 30.0

# asks Serve for the scheduler's endpoint and epoch
Locate = Callable[[], Awaitable[tuple[str, int]]]


class KvPublisher(Protocol):
    """Where one incarnation's news of KV blocks goes; never blocks and never fails into the caller."""

    async def start(self) -> None: ...

    def publish(self, events: KvEvents) -> None: ...

    async def stop(self) -> None: ...


PublisherFactory = Callable[[Ready], KvPublisher]


class WorkerFailed(RuntimeError):
    """The rank process cannot be started, or not be kept alive; says why in its own words."""


class Supervisor:
    """`start` once, then `check_health` now and then, `stop` at the end; all on one event loop.

    host: address of this machine on which routers reach the worker. log_file: gets the rank's output.
    """

    def __init__(
        self,
        config: ServeConfig,
        worker_id: str,
        locate: Locate,
        *,
        host: str = "127.0.0.1",
        make_publisher: PublisherFactory | None = None,
        log_file: Path | None = None,
        news: NewsSender | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.ready: Ready | None = None
        self.given_up: str | None = None
        self._config = config
        self._locate = locate
        self._host = host
        self._make_publisher = make_publisher
        self._log_file = log_file
        self._news = news
        self._security = Security.from_secret(config.secret())
        self._rank: RankProcess | None = None
        self._publisher: KvPublisher | None = None
        self._last_words: str | None = None
        self._heard = time.monotonic()
        self._stats = WorkerStats()
        self._card: ModelCard | None = None
        self._stopping = asyncio.Event()
        self._drained = asyncio.Event()
        self._started: asyncio.Future[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._attaching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the rank process that lives now."""
        return self._rank.pid if self._rank is not None and self._rank.alive else None

    def metrics(self) -> str:
        """This worker's, as Prometheus text; empty before its first start. From any thread."""
        return "" if self._card is None else worker_text(self._card, self._stats)

    async def start(self) -> None:
        """Returns when the worker can generate. Raises WorkerFailed; no second try is made then."""
        try:
            resolved = await asyncio.to_thread(
                resolve_model,
                self._config.model,
                cache_dir=self._config.cache_dir,
                revision=self._config.revision,
            )
            self._started = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep_alive(self._worker_config(resolved)))
            await self._started
        except Exception as error:
            self._tell(Failed(message=str(error)))
            self._hang_up()
            raise WorkerFailed(str(error)) from error

    def check_health(self) -> None:
        """Raises WorkerFailed once the rank process cannot be kept alive."""
        if self.given_up is not None:
            raise WorkerFailed(self.given_up)

    async def stop(self) -> None:
        """Take nothing new, let running sequences finish up to the drain limit, send those that are left to
        other workers, then end the process."""
        self._stopping.set()
        if self._attaching is not None:
            self._attaching.cancel()
        if self._rank is not None:
            if self.ready is not None:
                await self._drain(self._rank)
            await self._rank.end()
        if self._keeper is not None:
            await self._keeper
        self._hang_up()

    async def _drain(self, rank: RankProcess) -> None:
        with contextlib.suppress(PeerUnreachable):
            await rank.send(Drain())
            await _within(self._config.drain_s, self._drained)
            if not self._drained.is_set():
                # what is left goes on at other workers
                await rank.send(Drain(migrate=True))
                await _within(SHUTDOWN_S, self._drained)
                # whoever goes on with them may fetch what was computed here
                await asyncio.sleep(LENDING_S)
            await rank.send(Shutdown())
            await rank.wait(SHUTDOWN_S)

    async def _keep_alive(self, config: WorkerConfig) -> None:
        """One life of the rank process after the other, until stopped or hopeless."""
        failures = 0
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                reason = await self._live(config)
                if self._stopping.is_set():
                    return
                failures = 1 if time.monotonic() - began > STABLE_S else failures + 1
                if not self._was_ready() or failures > MAX_RESTARTS:
                    self._give_up(reason)
                    return
                log.warning("worker %s: %s; starting it again", self.worker_id, reason)
                await _within(min(FIRST_BACKOFF_S * 2 ** (failures - 1), MAX_BACKOFF_S), self._stopping)
        except Exception as error:
            log.exception("supervision of worker %s failed", self.worker_id)
            self._give_up(str(error) or repr(error))

    async def _live(self, config: WorkerConfig) -> str:
        """One life, from start to end; answers why it ended."""
        self._last_words = None
        self._stats = WorkerStats()
        self._drained.clear()
        self._rank = rank = RankProcess(
            config,
            rank_environment(config.engine.runner.threads, self._config.secret()),
            self._security,
            log_level=self._config.log_level,
            log_format=self._config.log_format,
            log_file=self._log_file,
        )
        watching = asyncio.create_task(self._watch(rank))
        try:
            async for message in rank.messages():
                await self._handle(message)
            return self._last_words or rank.epitaph()
        finally:
            watching.cancel()
            self.ready = None
            self._drained.set()
            await rank.close()
            if self._publisher is not None:
                await self._publisher.stop()
                self._publisher = None

    async def _watch(self, rank: RankProcess) -> None:
        """Kill a process that hangs: its I/O is silent, or its engine does not get on."""
        looked = time.monotonic()
        while rank.alive:
            await asyncio.sleep(WATCH_S)
            now, since = time.monotonic(), looked
            looked = now
            # before Ready it loads, for as long as that takes; who was held up himself has not heard yet
            if self.ready is None or now - since > WATCH_S + 1.0:
                self._heard = now
            elif now - self._heard > SILENCE_S:
                self._put_down(rank, f"no heartbeat for {SILENCE_S:.0f} s")
            elif self._stats.overdue(HANG_S):
                self._put_down(rank, f"one step has taken {self._stats.busy_for_s:.0f} s")

    def _put_down(self, rank: RankProcess, reason: str) -> None:
        self._last_words = f"the rank process hung: {reason}"
        log.warning("worker %s: %s, killing its process", self.worker_id, reason)
        rank.kill()

    async def _handle(self, message: ToSupervisor) -> None:
        self._heard = time.monotonic()
        match message:
            case Loading():
                self._tell(message)
            case Ready():
                await self._on_ready(message)
            case Heartbeat(stats=stats):
                self._stats = stats
                if stats.draining and stats.running == 0 and stats.waiting == 0:
                    self._drained.set()
            case KvEvents():
                if self._publisher is not None:
                    self._publisher.publish(message)
            case SchedulerLost():
                self._attach()
            case Failed(message=words):
                self._last_words = words

    async def _on_ready(self, ready: Ready) -> None:
        self.ready = ready
        self._card = ready.card
        if self._make_publisher is not None:
            self._publisher = self._make_publisher(ready)
            await self._publisher.start()
        self._attach()
        self._tell(ready)
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _attach(self) -> None:
        if self._attaching is None or self._attaching.done():
            self._attaching = asyncio.create_task(self._attach_to_scheduler())

    async def _attach_to_scheduler(self) -> None:
        while (rank := self._rank) is not None and rank.alive:
            try:
                endpoint, epoch = await asyncio.wait_for(self._locate(), LOCATE_TIMEOUT_S)
                await rank.send(Attach(endpoint=endpoint, epoch=epoch))
                return
            except Exception as error:
                log.warning("worker %s finds no scheduler yet: %r", self.worker_id, error)
                await asyncio.sleep(LOCATE_RETRY_S)

    def _worker_config(self, resolved: ResolvedModel) -> WorkerConfig:
        engine = self._config.engine_config(
            resolved.folder, self._config.served_model_name or resolved.served_name
        )
        runner = engine.runner.model_copy(update={"threads": threads_per_worker(self._config)})
        return WorkerConfig(
            worker_id=self.worker_id,
            engine=engine.model_copy(update={"runner": runner}),
            bind=f"tcp://{self._host}:0",
            advertise_host=self._config.advertise_host,
            fake=self._config.fake_engine if self._config.fake else None,
        )

    def _was_ready(self) -> bool:
        return self._started is not None and self._started.done()

    def _give_up(self, reason: str) -> None:
        self.given_up = reason
        if self._started is not None and not self._started.done():
            self._started.set_exception(WorkerFailed(reason))

    def _hang_up(self) -> None:
        if self._news is not None:
            self._news.close()
            self._news = None

    def _tell(self, news: Loading | Ready | Failed) -> None:
        if self._news is not None:
            self._news.send(news)


def replica_config(config: ServeConfig) -> ServeConfig:
    """What one replica is told: nothing of how many there are, for a change of scale must not replace it."""
    runner = config.runner.model_copy(update={"threads": threads_per_worker(config)})
    return config.model_copy(update={"runner": runner, "workers": 1, "routers": 1})


def threads_per_worker(config: ServeConfig) -> int | None:
    """CPU threads of each worker: as told, else the cores of this machine divided; None leaves it open."""
    if config.runner.threads is not None or config.address is not None:
        return config.runner.threads
    return max(1, len(os.sched_getaffinity(0)) // config.most_workers)


async def _within(limit_s: float, event: asyncio.Event) -> None:
    """Waits for the event, but no longer than the limit."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)

"""The whole way of a request without Ray: HTTP, router, scheduler server, fake rank processes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import uvicorn

from decodefleet.cluster.api.app import build_app
from decodefleet.cluster.api.settings import ApiSettings
from decodefleet.cluster.config import ServeConfig
from decodefleet.cluster.directory.holdings import Holdings
from decodefleet.cluster.directory.publisher import DirectoryPublisher
from decodefleet.cluster.directory.reader import DirectoryReader
from decodefleet.cluster.observability.spans import Tracing
from decodefleet.cluster.replica import Supervisor
from decodefleet.cluster.router import Router, RouterSettings
from decodefleet.cluster.scheduling.config import SchedulingConfig
from decodefleet.cluster.scheduling.server import SchedulerServer
from decodefleet.worker.config import BatchConfig, CacheConfig, FakeConfig, ModelOptions, RunnerConfig
from decodefleet.worker.protocol import Ready, WorkerStats
from decodefleet.worker.transport import Security

T = TypeVar("T")

MODEL = "tiny"


class Stack:
    """One server with all its parts; everything but the ranks lives on the event loop of one thread."""

    def __init__(self, folder: Path, workers: int, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="stack")
        self._folder = folder
        self._workers = workers
        self._options = options
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.supervisors: list[Supervisor] = []
        self.tracing: Tracing | None = options.pop("tracing", None)

    def start(self) -> None:
        self._thread.start()
        self.call(self._start)
        with self.http() as http:
            while self._workers and http.get("/ready").status_code != 200:
                time.sleep(0.02)

    def stop(self) -> None:
        self.call(self._stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run on the stack's own event loop, and wait."""

        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout=120)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def http(self) -> httpx.Client:
        # httpcore 1.0 may close another thread's connection with a surplus one: none is surplus
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
        return httpx.Client(base_url=self.url, timeout=60, limits=limits)

    def stats(self) -> list[WorkerStats]:
        """As the workers last reported them to the scheduler."""
        return [member.stats for member in self.scheduler.core.fleet]

    async def locate(self) -> tuple[str, int]:
        return self.scheduler.endpoint, self.scheduler.epoch

    async def _start(self) -> None:
        secret = self._options.pop("secret", None)
        config = ServeConfig(
            model=str(self._folder),
            served_model_name=MODEL,
            fake=self._options.pop("fake", True),
            cluster_secret=secret,
            weights=ModelOptions(max_model_len=self._options.pop("max_model_len", 2048)),
            cache=CacheConfig(num_gpu_blocks_override=self._options.pop("blocks", 4096)),
            batch=BatchConfig(max_num_seqs=self._options.pop("max_num_seqs", 64)),
            runner=RunnerConfig(**self._options.pop("runner", {})),
            fake_engine=FakeConfig(
                step_base_s=self._options.pop("step_s", 0.001),
                prefill_token_s=self._options.pop("prefill_token_s", 0.0),
            ),
        )
        security = Security.from_secret(config.secret())
        scheduling = SchedulingConfig(**self._options.pop("scheduling", {}))
        redis_url = self._options.pop("redis_url", None)
        directory = DirectoryReader(redis_url, MODEL) if redis_url else None
        self.scheduler = SchedulerServer(security=security, config=scheduling, directory=directory)
        await self.scheduler.start()

        def make_publisher(ready: Ready) -> DirectoryPublisher:
            return DirectoryPublisher.of_worker(redis_url, ready)

        self.supervisors = [
            Supervisor(
                config,
                f"worker-{number}",
                self.locate,
                make_publisher=make_publisher if redis_url else None,
            )
            for number in range(self._workers)
        ]
        await asyncio.gather(*(supervisor.start() for supervisor in self.supervisors))
        self.router = Router(self.locate, security, self._options.pop("router", RouterSettings()))
        self.router.start()
        app = build_app(
            self.router,
            ApiSettings(**self._options),
            fleet=self,
            tracing=self.tracing,
        )
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def _stop(self) -> None:
        self._server.should_exit = True
        await self._serving
        await self.router.close()
        await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors))
        await self.scheduler.stop()

    async def metrics(self) -> str:
        return await self.scheduler.metrics()

    async def placements(self, request_id: str | None) -> list[dict[str, Any]]:
        return self.scheduler.placements(request_id)

    async def directory(self, model: str | None, prompt: bytes | None) -> Holdings:
        return self.scheduler.directory(model, prompt)

    async def overview(self, since: float) -> dict[str, Any]:
        return self.scheduler.overview(since)


@pytest.fixture(scope="session")
def make_stack(smollm2: Path) -> Iterator[Callable[..., Stack]]:
    """Starts servers; all of them are stopped at the end."""
    with _stacks(smollm2) as make:
        yield make


@pytest.fixture
def make_brief_stack(smollm2: Path) -> Iterator[Callable[..., Stack]]:
    """The same, stopped at the end of the test."""
    with _stacks(smollm2) as make:
        yield make


@contextmanager
def _stacks(default: Path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def make(workers: int = 1, folder: Path = default, **options: Any) -> Stack:
        stack = Stack(folder, workers, **options)
        stacks.append(stack)
        stack.start()
        return stack

    yield make
    for stack in stacks:
        stack.stop()


@pytest.fixture(scope="session")
def stack(make_stack: Callable[..., Stack]) -> Stack:
    """Two workers, shared by all tests that leave it as they found it."""
    return make_stack(workers=2)

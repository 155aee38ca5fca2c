"""The supervisor against real rank processes (with the fake engine), without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from waiting import eventually

from decodefleet.cluster import replica
from decodefleet.cluster.config import ServeConfig
from decodefleet.cluster.news import NewsReceiver, NewsSender
from decodefleet.cluster.replica import Supervisor, WorkerFailed, replica_config, threads_per_worker
from decodefleet.worker.config import FakeConfig, RunnerConfig
from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.protocol import (
    Acknowledge,
    Heartbeat,
    KvEvents,
    Ready,
    Register,
    StepOutput,
    Submit,
    ToRouter,
    ToScheduler,
)
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.transport import Codec, Security, bind, connect

SECRET = "only for this test"


class TinyScheduler:
    """Answers workers as the scheduler does, and keeps what they said."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.registered: list[Register] = []
        self._context = zmq.asyncio.Context()
        self._socket, self.endpoint = bind(
            self._context, zmq.ROUTER, "tcp://127.0.0.1:0", Security.from_secret(SECRET)
        )
        self._codec: Codec[ToScheduler] = Codec(ToScheduler)
        self._task = asyncio.create_task(self._run())

    async def locate(self) -> tuple[str, int]:
        return self.endpoint, self.epoch

    def stop(self) -> None:
        self._task.cancel()
        self._context.destroy(linger=0)

    async def _run(self) -> None:
        while True:
            worker, frame = await self._socket.recv_multipart()
            message = self._codec.decode(frame)
            if isinstance(message, Register):
                self.registered.append(message)
            known = isinstance(message, Register) or any(
                isinstance(message, Heartbeat) and message.incarnation == known.incarnation
                for known in self.registered
            )
            await self._socket.send_multipart(
                (worker, self._codec.encode(Acknowledge(epoch=self.epoch, known=known)))
            )


class Recorder:
    """A publisher that keeps what it gets."""

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.events: list[KvEvents] = []
        self.state = "new"

    async def start(self) -> None:
        self.state = "started"

    def publish(self, events: KvEvents) -> None:
        self.events.append(events)

    async def stop(self) -> None:
        self.state = "stopped"


@pytest.fixture
async def scheduler() -> AsyncIterator[TinyScheduler]:
    scheduler = TinyScheduler()
    yield scheduler
    scheduler.stop()


def make_config(folder: Path, **changes: Any) -> ServeConfig:
    values: dict[str, Any] = {"model": str(folder), "fake": True, "cluster_secret": SECRET, "drain_s": 20.0}
    return ServeConfig(**values | changes)


@contextlib.asynccontextmanager
async def running(config: ServeConfig, scheduler: TinyScheduler, **options: Any) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(config, "w1", scheduler.locate, **options)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()
        assert supervisor.pid is None


class Client:
    """Speaks to a worker as a router does."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._codec: Codec[ToRouter] = Codec(ToRouter)
        self._socket = connect(self._context, endpoint, Security.from_secret(SECRET), "router")

    async def submit(self, ready: Ready, max_tokens: int) -> None:
        submit = Submit(
            request_id="r",
            incarnation=ready.incarnation,
            epoch=1,
            prompt=pack_tokens(list(range(40))),
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        await self._socket.send(self._codec.encode(submit))

    async def next(self) -> msgspec.Struct:
        return self._codec.decode(await self._socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


async def test_starts_a_rank_and_registers_it(
    smollm2: Path, scheduler: TinyScheduler, tmp_path: Path
) -> None:
    receiver = NewsReceiver(f"ipc://{tmp_path}/news")
    async with running(
        make_config(smollm2), scheduler, news=NewsSender(receiver.endpoint, "w1")
    ) as supervisor:
        assert supervisor.ready is not None
        supervisor.check_health()
        await eventually(lambda: scheduler.registered)
        assert scheduler.registered[0].incarnation == supervisor.ready.incarnation
        assert scheduler.registered[0].endpoint == supervisor.ready.endpoint
    news = receiver.receive(timeout_s=5)
    receiver.close()
    assert news[-1].worker_id == "w1"
    assert isinstance(news[-1].news, Ready)


async def test_a_killed_rank_comes_back_as_a_new_incarnation(smollm2: Path, scheduler: TinyScheduler) -> None:
    async with running(make_config(smollm2), scheduler) as supervisor:
        first = supervisor.ready
        assert first is not None
        assert supervisor.pid is not None
        await eventually(lambda: scheduler.registered)
        os.kill(supervisor.pid, signal.SIGKILL)
        await eventually(lambda: supervisor.ready is not None and supervisor.ready is not first)
        await eventually(lambda: len(scheduler.registered) == 2)
        assert scheduler.registered[1].worker_id == first.worker_id
        assert scheduler.registered[1].incarnation != first.incarnation
        supervisor.check_health()


async def test_a_rank_that_is_frozen_for_long_is_killed_and_started_again(
    smollm2: Path, scheduler: TinyScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "SILENCE_S", 0.6)
    monkeypatch.setattr(replica, "WATCH_S", 0.05)
    async with running(make_config(smollm2), scheduler) as supervisor:
        first = supervisor.ready
        assert first is not None
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGSTOP)
        await eventually(lambda: supervisor.ready is not first and supervisor.ready is not None)
        supervisor.check_health()


async def test_an_engine_that_hangs_is_killed_though_its_heart_beats(
    smollm2: Path, scheduler: TinyScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "HANG_S", 0.3)
    monkeypatch.setattr(replica, "WATCH_S", 0.05)
    config = make_config(smollm2, fake_engine=FakeConfig(step_base_s=0.001, hang_after=3))
    async with running(config, scheduler) as supervisor:
        first = supervisor.ready
        assert first is not None
        client = Client(first.endpoint)
        await client.submit(first, max_tokens=40)
        await eventually(lambda: supervisor.ready is not first and supervisor.ready is not None)
        client.close()


async def test_a_rank_that_cannot_be_kept_alive_makes_the_replica_unhealthy(
    smollm2: Path, scheduler: TinyScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "MAX_RESTARTS", 1)
    monkeypatch.setattr(replica, "FIRST_BACKOFF_S", 0.0)
    async with running(make_config(smollm2), scheduler) as supervisor:
        for _ in range(2):
            supervisor.check_health()
            await eventually(lambda: supervisor.ready is not None)
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            await eventually(lambda: supervisor.ready is None)
        await eventually(lambda: supervisor.given_up)
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            supervisor.check_health()


async def test_kv_events_reach_the_publisher_of_their_incarnation(
    smollm2: Path, scheduler: TinyScheduler
) -> None:
    publishers: list[Recorder] = []

    def make_publisher(ready: Ready) -> Recorder:
        publishers.append(Recorder(ready))
        return publishers[-1]

    async with running(make_config(smollm2), scheduler, make_publisher=make_publisher) as supervisor:
        assert supervisor.ready is not None
        client = Client(supervisor.ready.endpoint)
        await client.submit(supervisor.ready, max_tokens=4)
        await eventually(lambda: publishers[0].events)
        assert publishers[0].ready == supervisor.ready
        assert publishers[0].state == "started"
        assert len(publishers[0].events[0].stored) >= 16
        client.close()
    assert publishers[0].state == "stopped"


async def test_stop_lets_running_sequences_finish(smollm2: Path, scheduler: TinyScheduler) -> None:
    config = make_config(smollm2, fake_engine=FakeConfig(step_base_s=0.02))
    supervisor = Supervisor(config, "w1", scheduler.locate)
    await supervisor.start()
    assert supervisor.ready is not None
    client = Client(supervisor.ready.endpoint)
    await client.submit(supervisor.ready, max_tokens=40)
    output = await client.next()
    stopping = asyncio.create_task(supervisor.stop())
    tokens = 0
    while True:
        assert isinstance(output, StepOutput)
        tokens += sum(len(delta.tokens) for delta in output.deltas)
        if output.deltas[-1].finish_reason is not None:
            break
        output = await client.next()
    await stopping
    client.close()
    assert output.deltas[-1].finish_reason == "length"
    assert tokens == 40


async def test_stop_does_not_wait_longer_than_the_drain_limit(
    smollm2: Path, scheduler: TinyScheduler
) -> None:
    config = make_config(smollm2, fake_engine=FakeConfig(step_base_s=0.05), drain_s=0.1)
    async with running(config, scheduler) as supervisor:
        assert supervisor.ready is not None
        client = Client(supervisor.ready.endpoint)
        await client.submit(supervisor.ready, max_tokens=1000)
        await client.next()
    output = await client.next()
    while isinstance(output, StepOutput) and output.deltas[-1].finish_reason is None:
        output = await client.next()
    client.close()
    assert isinstance(output, StepOutput)
    assert (output.deltas[-1].finish_reason, output.deltas[-1].moved) == ("error", "drained")


async def test_a_bad_model_is_reported_in_the_words_of_who_found_it(
    tmp_path: Path, scheduler: TinyScheduler
) -> None:
    receiver = NewsReceiver(f"ipc://{tmp_path}/news")
    supervisor = Supervisor(
        make_config(tmp_path / "nothing"), "w1", scheduler.locate, news=NewsSender(receiver.endpoint, "w1")
    )
    with pytest.raises(WorkerFailed, match="nothing"):
        await supervisor.start()
    await supervisor.stop()
    news = receiver.receive(timeout_s=5)
    receiver.close()
    assert "nothing" in news[-1].news.message  # type: ignore[union-attr]


async def test_a_rank_that_fails_at_start_fails_the_start(
    smollm2: Path, scheduler: TinyScheduler, tmp_path: Path
) -> None:
    # an address that cannot be listened on: the rank ends before it can say anything
    log = tmp_path / "worker.log"
    supervisor = Supervisor(make_config(smollm2), "w1", scheduler.locate, host="203.0.113.1", log_file=log)
    with pytest.raises(WorkerFailed, match=r"exit code 1.*Cannot assign requested address"):
        await supervisor.start()
    await supervisor.stop()
    assert "Traceback" in log.read_text()


async def test_a_rank_dies_with_its_supervisor(smollm2: Path, tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib\n"
        "from decodefleet.cluster.config import ServeConfig\n"
        "from decodefleet.cluster.replica import Supervisor\n"
        "async def locate(): raise LookupError\n"
        "async def main():\n"
        f"    log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        f"    s = Supervisor(ServeConfig(model={str(smollm2)!r}, fake=True), 'w1', locate, log_file=log)\n"
        "    await s.start()\n"
        "    print(s.pid, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    rank = int(await process.stdout.readline())
    assert psutil.pid_exists(rank)
    process.kill()
    await process.wait()
    await eventually(lambda: not psutil.pid_exists(rank))


def test_threads_are_the_cores_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert threads_per_worker(ServeConfig()) == 8
    assert threads_per_worker(ServeConfig(workers=3)) == 2
    assert threads_per_worker(ServeConfig(workers=9)) == 1
    assert threads_per_worker(ServeConfig(workers=3, runner=RunnerConfig(threads=5))) == 5


def test_a_replica_is_told_nothing_that_a_change_of_scale_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    one, many = ServeConfig(runner=RunnerConfig(threads=1)), {"workers": 5, "routers": 3}
    assert replica_config(one.model_copy(update=many)) == replica_config(one)
    assert replica_config(ServeConfig(workers=4)).runner.threads == 2
    far = ServeConfig(address="auto", redis_url="redis://r", cluster_secret="s", workers=4)
    assert replica_config(far).runner.threads is None

"""The scheduler over real sockets, plain and with CURVE."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio

from decodefleet.cluster.scheduling import history
from decodefleet.cluster.scheduling.config import SchedulingConfig
from decodefleet.cluster.scheduling.server import SchedulerServer
from decodefleet.worker.protocol import (
    Acknowledge,
    FromScheduler,
    Heartbeat,
    Hello,
    ModelCard,
    Place,
    Placement,
    Refusal,
    Register,
    Release,
    RouterReport,
    Welcome,
    WorkerStats,
)
from decodefleet.worker.transport import Codec, Security, connect

SECRETS = [None, "a secret of the cluster"]


class Peer:
    """A router or worker as the scheduler sees it: one DEALER."""

    def __init__(self, endpoint: str, identity: str, security: Security | None) -> None:
        self.context = zmq.Context()
        self.plain = connect(self.context, endpoint, security, identity)
        self.socket = zmq.asyncio.Socket.from_socket(self.plain)
        self.codec: Codec[FromScheduler] = Codec(FromScheduler)

    async def send(self, message) -> None:
        await self.socket.send(self.codec.encode(message))

    async def send_raw(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def receive(self) -> FromScheduler:
        return self.codec.decode(await asyncio.wait_for(self.socket.recv(), 20))

    async def receive_a(self, kind):
        while True:
            message = await self.receive()
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self.socket.close()
        self.context.destroy(linger=0)


def make_card(name: str = "m") -> ModelCard:
    return ModelCard(
        name=name,
        folder="/nowhere",
        max_model_len=2048,
        vocab_size=1000,
        block_size=16,
        hash_root=b"r" * 16,
        kv_bytes_per_token=1024,
    )


def make_register(worker_id: str, incarnation: str = "one") -> Register:
    return Register(
        worker_id=worker_id,
        incarnation=incarnation,
        endpoint="tcp://127.0.0.1:1",
        card=make_card(),
        stats=WorkerStats(total_blocks=1000, free_blocks=1000),
    )


def make_place(request_id: str, **changes) -> Place:
    return Place(
        **{"request_id": request_id, "model": "m", "prompt_tokens": 64, "max_new_tokens": 32} | changes
    )


@contextlib.asynccontextmanager
async def cluster(secret: str | None = None, **options) -> AsyncIterator:
    """A running server and a factory of connected peers."""
    security = Security.from_secret(secret)
    server = SchedulerServer(security=security, seed=1, **options)
    endpoint = await server.start()
    peers = []

    def peer(identity: str, secret: str | None = secret) -> Peer:
        peers.append(Peer(endpoint, identity, Security.from_secret(secret)))
        return peers[-1]

    try:
        yield server, peer
    finally:
        for each in peers:
            each.close()
        await server.stop()


@pytest.mark.parametrize("secret", SECRETS)
async def test_request_from_hello_to_release(secret):
    async with cluster(secret, epoch=7) as (server, peer):
        router, worker = peer("router-1"), peer("worker-1")
        await router.send(Hello(router_id="router-1"))
        assert await router.receive() == Welcome(epoch=7, models=())
        await worker.send(make_register("worker-1"))
        assert await worker.receive() == Acknowledge(epoch=7)
        welcome = await router.receive()
        assert (welcome.epoch, welcome.models, welcome.ready) == (7, (make_card(),), ("m",))
        assert [brief.worker_id for brief in welcome.workers] == ["worker-1"]

        await router.send(make_place("a"))
        placement = await router.receive_a(Placement)
        assert (placement.worker_id, placement.incarnation, placement.epoch) == ("worker-1", "one", 7)
        assert len(server.core.ledger) == 1
        await router.send(Release(request_id="a", generated=5))
        await worker.send(Heartbeat(worker_id="worker-1", incarnation="one", stats=WorkerStats()))
        assert await worker.receive() == Acknowledge(epoch=7)
        assert len(server.core.ledger) == 0
        server.core.check_integrity()
        (decision,) = server.placements("a")
        assert decision["worker_id"] == "worker-1"
        assert decision["considered"][0]["cost_s"]["total"] > 0


async def test_wrong_secret_is_not_heard():
    async with cluster("right") as (server, peer):
        stranger, router = peer("stranger", "wrong"), peer("router-1")
        await stranger.send(Hello(router_id="stranger"))
        await router.send(Hello(router_id="router-1"))
        await router.receive()
        assert server.core.routers == ("router-1",)


async def test_beyond_loopback_needs_a_secret():
    server = SchedulerServer(bind="tcp://0.0.0.0:0")
    with pytest.raises(ValueError, match="secret"):
        await server.start()
    await server.stop()


async def test_advertised_host():
    server = SchedulerServer(
        bind="tcp://127.0.0.1:0", advertise_host="scheduler.example", security=Security.from_secret("s")
    )
    endpoint = await server.start()
    await server.stop()
    assert endpoint.startswith("tcp://scheduler.example:")


async def test_malformed_frames_are_counted_and_harm_nobody():
    async with cluster() as (server, peer):
        router = peer("router-1")
        good = router.codec.encode(make_place("a"))
        for frames in (
            [b""],
            [b"\x01"],
            [b"\x02" + good[1:]],
            [good[:-3]],
            [b"\x01\xc1\xc1"],
            [good, good],
            [b"\x01" + b"\x91" * 5000],
        ):
            await router.send_raw(*frames)
        # in another's name
        await router.send(Hello(router_id="router-2"))
        await router.send(make_register("worker-9"))
        await router.send(Hello(router_id="router-1"))
        assert isinstance(await router.receive(), Welcome)
        assert server.malformed == 9
        assert server.core.routers == ("router-1",)


async def test_identity_that_is_not_text():
    async with cluster() as (server, peer):
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.identity = b"\xff\xfe"
        raw.connect(server.endpoint)
        raw.send(b"\x01")
        router = peer("router-1")
        while not server.malformed:
            await router.send(Hello(router_id="router-1"))
            await router.receive()
        context.destroy(linger=0)


async def test_router_that_left_gives_everything_back():
    async with cluster() as (server, peer):
        worker, gone, other = peer("worker-1"), peer("router-1"), peer("router-2")
        await worker.send(make_register("worker-1"))
        await worker.receive()
        await gone.send(make_place("a"))
        await gone.receive_a(Placement)
        gone.close()
        await other.send(Hello(router_id="router-2"))
        await other.receive()
        # the next news for the router that left finds it gone
        while "router-1" in server.core.routers:
            incarnation = f"i{server.unreachable.total()}{asyncio.get_running_loop().time()}"
            await worker.send(make_register("worker-1", incarnation))
            await worker.receive()
            await asyncio.sleep(0.01)
            draining = WorkerStats(draining=True)
            await worker.send(Heartbeat(worker_id="worker-1", incarnation=incarnation, stats=draining))
            await worker.receive()
            await asyncio.sleep(0.1)
        assert len(server.core.ledger) == 0
        server.core.check_integrity()


async def test_unequal_workers_under_one_name_do_not_go_unnoticed(caplog):
    async with cluster() as (_, peer):
        for worker_id, root in (("worker-1", b"r"), ("worker-2", b"r"), ("worker-3", b"x")):
            worker = peer(worker_id)
            register = make_register(worker_id)
            card = msgspec.structs.replace(register.card, hash_root=root * 16)
            await worker.send(msgspec.structs.replace(register, card=card))
            await worker.receive()
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "worker-3 serves m with another hash_root" in record.getMessage()


async def test_unknown_worker_is_asked_to_register():
    async with cluster(epoch=3) as (_, peer):
        worker = peer("worker-1")
        await worker.send(Heartbeat(worker_id="worker-1", incarnation="one", stats=WorkerStats()))
        assert await worker.receive() == Acknowledge(epoch=3, known=False)


async def test_who_drained_before_it_went_was_not_lost(monkeypatch):
    monkeypatch.setattr(history, "STEP_S", 0.01)
    async with cluster(config=SchedulingConfig(worker_timeout_s=0.5)) as (server, peer):
        names = ("worker-drained", "worker-lost")
        workers = [peer(name) for name in names]
        for name, worker in zip(names, workers, strict=True):
            await worker.send(make_register(name))
            await worker.receive()
        # idle, it is through at once: between two looks at the fleet, if need be
        drained = Heartbeat(worker_id=names[0], incarnation="one", stats=WorkerStats(draining=True))
        await workers[0].send(drained)
        told: dict[str, str] = {}
        while told.keys() != {*names} or "came" in told.values():
            await asyncio.sleep(0.02)
            told = {change["worker_id"]: change["what"] for change in server.overview()["changes"]}
        assert told == {"worker-drained": "left", "worker-lost": "lost"}


async def test_refusal_reaches_the_router():
    async with cluster() as (_, peer):
        worker, router = peer("worker-1"), peer("router-1")
        await worker.send(make_register("worker-1"))
        await worker.receive()
        await router.send(make_place("a", model="nobody's"))
        refusal = await router.receive_a(Refusal)
        assert refusal.reason == "unknown_model"


async def test_metrics_add_up_and_survive_their_sources():
    async with cluster() as (server, peer):
        worker, router = peer("worker-1"), peer("router-1")
        await worker.send(make_register("worker-1"))
        await worker.receive()
        stats = WorkerStats(total_blocks=100, free_blocks=50, prompt_tokens=40, finished={"stop": 2})
        await worker.send(Heartbeat(worker_id="worker-1", incarnation="one", stats=stats))
        await worker.receive()
        text = "# HELP x_total X.\n# TYPE x_total counter\nx_total 3.0\n"
        await router.send(RouterReport(router_id="router-1", metrics=text))
        await router.receive()
        metrics = await server.metrics()
        assert "x_total 3\n" in metrics
        assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.5\n' in metrics
        assert 'decodefleet_prompt_tokens_total{model_name="m"} 40\n' in metrics

        await worker.send(make_register("worker-1", "two"))
        await worker.receive()
        after = await server.metrics()
        assert 'decodefleet_prompt_tokens_total{model_name="m"} 40\n' in after
        assert 'vllm:request_success_total{model_name="m",finished_reason="stop"} 2\n' in after


async def test_stop_before_start_and_twice():
    server = SchedulerServer()
    await server.stop()
    with pytest.raises(RuntimeError, match="not started"):
        server.check_health()
    await server.start()
    server.check_health()
    await server.stop()
    await server.stop()


async def test_broken_socket_shows_in_health():
    server = SchedulerServer()
    await server.start()
    server._socket.close()
    while not server._task.done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(RuntimeError, match="has ended"):
        server.check_health()
    await server.stop()

"""A router's connections to workers, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq.asyncio
from relay import Relay
from tiny_peers import PATIENCE_S, TinyWorker
from waiting import eventually

from decodefleet.cluster.dataplane import connection, worker_clients
from decodefleet.cluster.dataplane.errors import WorkerLost, WorkerRejected
from decodefleet.cluster.dataplane.streams import TokenStream
from decodefleet.cluster.dataplane.worker_clients import WorkerClients
from decodefleet.worker import transport
from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.protocol import Abort, Fenced, StepOutput, Submit, TokenDelta
from decodefleet.worker.sampling_params import SamplingParams


@pytest.fixture
async def clients(context: zmq.asyncio.Context) -> AsyncIterator[WorkerClients]:
    clients = WorkerClients(context, "router-0", None)
    yield clients
    clients.close()


def submit(request_id: str = "a", n: int = 1) -> Submit:
    return Submit(
        request_id=request_id,
        incarnation="i0",
        epoch=1,
        prompt=pack_tokens([5]),
        params=SamplingParams(n=n),
    )


async def test_tokens_find_their_stream(context: zmq.asyncio.Context, clients: WorkerClients) -> None:
    worker = TinyWorker(context)
    streams = {name: clients.submit(worker.placement(name), submit(name)) for name in ("a", "b")}
    submits = {(await worker.wait(Submit)).request_id for _ in streams}
    assert submits == {"a", "b"}
    assert worker.peer.startswith(b"router-0.")
    worker.send_raw(b"rubbish")
    worker.send(
        StepOutput(
            worker_id="w0",
            incarnation="i0",
            step=1,
            deltas=(
                TokenDelta(request_id="b", tokens=(2,)),
                TokenDelta(request_id="a", tokens=(1,)),
                TokenDelta(request_id="a", attempt=1, tokens=(9,)),
                TokenDelta(request_id="stranger", tokens=(9,)),
            ),
        )
    )
    assert [delta.tokens for delta in await streams["a"].take()] == [(1,)]
    assert [delta.tokens for delta in await streams["b"].take()] == [(2,)]
    streams["a"].close()
    assert (await worker.wait(Abort)).request_id == "a"


async def test_a_rejection_ends_one_stream(context: zmq.asyncio.Context, clients: WorkerClients) -> None:
    worker = TinyWorker(context)
    stream = clients.submit(worker.placement(), submit())
    other = clients.submit(worker.placement("b"), submit("b"))
    worker.reject(await worker.wait(Submit), "draining")
    with pytest.raises(WorkerRejected) as caught:
        await stream.take()
    assert caught.value.rejected.reason == "draining"
    worker.emit(await worker.wait(Submit), 1)
    assert len(await other.take()) == 1


async def test_a_dead_worker_ends_its_streams_only(
    context: zmq.asyncio.Context, clients: WorkerClients
) -> None:
    dying, living = TinyWorker(context, "dying"), TinyWorker(context, "living")
    lost = clients.submit(dying.placement("a"), submit("a"))
    kept = clients.submit(living.placement("b"), submit("b"))
    await dying.wait(Submit)
    dying.die()
    with pytest.raises(WorkerLost, match="dying"):
        async with asyncio.timeout(PATIENCE_S):
            await lost.take()
    living.emit(await living.wait(Submit), 1)
    assert len(await kept.take()) == 1


async def test_a_worker_that_cannot_be_reached_is_lost(
    context: zmq.asyncio.Context, clients: WorkerClients
) -> None:
    worker = TinyWorker(context)
    placement = worker.placement()
    worker.die()
    stream = clients.submit(placement, submit())
    with pytest.raises(WorkerLost):
        async with asyncio.timeout(PATIENCE_S):
            await stream.take()


async def test_an_endpoint_that_makes_no_sense_is_that_of_a_lost_worker(
    context: zmq.asyncio.Context, clients: WorkerClients
) -> None:
    placement = msgspec.structs.replace(TinyWorker(context).placement(), endpoint="tcp://nowhere")
    with pytest.raises(WorkerLost):
        clients.submit(placement, submit())
    await eventually(lambda: not clients.connected)


async def test_one_that_accepts_and_says_nothing_is_lost(
    clients: WorkerClients, context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.1)
    worker = TinyWorker(context)
    # the kernel accepts, nobody speaks
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        placement = msgspec.structs.replace(worker.placement(), endpoint=endpoint)
        stream = clients.submit(placement, submit())
        with pytest.raises(WorkerLost, match="cannot be reached"):
            await stream.take()


async def test_idle_connections_are_closed_and_made_again(
    context: zmq.asyncio.Context, clients: WorkerClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_clients, "IDLE_S", 0.0)
    worker = TinyWorker(context)
    for name in ("a", "b"):
        stream = clients.submit(worker.placement(name), submit(name))
        worker.emit(await worker.wait(Submit), 1, finish_reason="stop")
        assert len(await stream.take()) == 1
        assert clients.connected == 1
        stream.close()
        await eventually(lambda: not clients.connected)


async def until_lost(stream: TokenStream, match: str) -> None:
    async def take_all() -> None:
        while True:
            await stream.take()

    with pytest.raises(WorkerLost, match=match):
        await asyncio.wait_for(take_all(), PATIENCE_S)


async def test_a_worker_that_falls_silent_is_lost(
    context: zmq.asyncio.Context, clients: WorkerClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_clients, "SWEEP_S", 0.02)
    monkeypatch.setattr(worker_clients, "SILENCE_S", 0.2)
    worker = TinyWorker(context)
    stream = clients.submit(worker.placement(), submit())
    await worker.wait(Submit)
    # one of an older version says nothing during a long prefill, and need not
    await asyncio.sleep(0.3)
    worker.pulse()
    await until_lost(stream, "silent")
    # should it live after all, it is told to stop
    assert (await worker.wait(Abort)).request_id == "a"
    stream.close()


async def test_one_stream_that_gets_no_more_is_given_up(
    context: zmq.asyncio.Context, clients: WorkerClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_clients, "SWEEP_S", 0.02)
    monkeypatch.setattr(worker_clients, "STREAM_SILENCE_S", 0.2)
    worker = TinyWorker(context)
    stuck, waits = (clients.submit(worker.placement(name), submit(name)) for name in ("a", "b"))
    worker.emit(await worker.wait(Submit), 1)
    await until_lost(stuck, "no more")
    assert (await worker.wait(Abort)).request_id == "a"
    # how long the first token may take is not decided here
    waiting = asyncio.create_task(waits.take())
    await asyncio.sleep(0.3)
    worker.emit(submit("b"), 1)
    assert len(await waiting) == 1


@pytest.mark.parametrize(("incarnation", "lost"), [("i0", True), ("another", False)])
async def test_a_fence_ends_the_streams_of_that_life(
    context: zmq.asyncio.Context, clients: WorkerClients, incarnation: str, lost: bool
) -> None:
    worker = TinyWorker(context)
    stream = clients.submit(worker.placement(), submit())
    sent = await worker.wait(Submit)
    clients.fence([Fenced("w0", incarnation, "stalled")])
    if lost:
        await until_lost(stream, "stalled")
        assert (await worker.wait(Abort)).request_id == "a"
        assert not clients.connected
    else:
        worker.emit(sent, 1)
        assert len(await stream.take()) == 1


async def test_a_worker_that_only_the_scheduler_misses_keeps_its_streams(
    context: zmq.asyncio.Context, clients: WorkerClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_clients, "SWEEP_S", 0.02)
    monkeypatch.setattr(worker_clients, "LATELY_S", 0.2)
    worker = TinyWorker(context)
    stream = clients.submit(worker.placement(), submit())
    sent = await worker.wait(Submit)
    worker.pulse()
    worker.emit(sent, 1)
    assert len(await stream.take()) == 1
    clients.fence([Fenced("w0", "i0", "silent")])
    worker.emit(sent, 2)
    assert len(await stream.take()) == 1
    # until it is silent here as well
    await asyncio.sleep(0.3)
    clients.fence([Fenced("w0", "i0", "silent")])
    await until_lost(stream, "silent")


async def test_another_life_at_the_same_place_is_another_worker(
    context: zmq.asyncio.Context, clients: WorkerClients
) -> None:
    worker = TinyWorker(context)
    old = clients.submit(worker.placement("a"), submit("a"))
    await worker.wait(Submit)
    first = worker.peer
    placement = msgspec.structs.replace(worker.placement("b"), incarnation="i1")
    clients.submit(placement, submit("b"))
    await until_lost(old, "restarted")
    await worker.wait(Submit)
    assert worker.peer != first


async def test_a_worker_that_is_cut_off_is_lost_though_nothing_was_reset(
    context: zmq.asyncio.Context, clients: WorkerClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(transport, "HEARTBEAT_TIMEOUT_MS", 400)
    worker = TinyWorker(context)
    relay = Relay(worker.endpoint)
    try:
        placement = msgspec.structs.replace(worker.placement(), endpoint=relay.endpoint)
        stream = clients.submit(placement, submit())
        worker.emit(await worker.wait(Submit), 1)
        assert len(await stream.take()) == 1
        relay.cut()
        await until_lost(stream, "connection lost")
        # what it says when it is heard again is for nobody
        relay.heal()
        again = clients.submit(placement, msgspec.structs.replace(submit(), attempt=1))
        sent = await worker.wait(Submit, lambda sent: sent.attempt == 1)
        worker.emit(submit(), 7)
        worker.emit(sent, 8)
        assert [delta.tokens for delta in await again.take()] == [(8,)]
    finally:
        relay.close()

"""A router's connections to workers, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq.asyncio
from tiny_peers import PATIENCE_S, TinyWorker, eventually

from decodefleet.cluster.dataplane import connection, worker_clients
from decodefleet.cluster.dataplane.errors import WorkerLost, WorkerRejected
from decodefleet.cluster.dataplane.worker_clients import WorkerClients
from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.protocol import Abort, StepOutput, Submit, TokenDelta
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
    assert worker.peer == b"router-0"
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

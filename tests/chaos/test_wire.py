"""The suite's own forwarder: what it cuts off gets neither a byte nor a reset, and nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
from chaos_wire import HOST, Wire, close_server


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket, socket.socket]]:
    """A wire with one connection through it: the end that connected, and the end that listened."""
    wire = Wire(lambda: [psutil.Process()])
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire.start()
        near = connect(server.getsockname()[1])
        far, _ = server.accept()
        with near, far:
            near.settimeout(60)
            yield wire, near, far
        wire.stop()


def connect(port: int) -> socket.socket:
    """As soon as the wire listens there."""
    while True:
        try:
            return socket.create_connection((HOST, port))
        except ConnectionRefusedError:
            time.sleep(0.01)


def test_bytes_pass_both_ways(ends: tuple[Wire, socket.socket, socket.socket]) -> None:
    _, near, far = ends
    near.sendall(b"there")
    assert far.recv(100) == b"there"
    far.sendall(b"back")
    assert near.recv(100) == b"back"


def test_what_is_sent_while_cut_arrives_when_healed(ends: tuple[Wire, socket.socket, socket.socket]) -> None:
    wire, near, far = ends
    wire.cut(psutil.Process())
    time.sleep(0.1)
    near.sendall(b"late")
    far.settimeout(0.3)
    with pytest.raises(TimeoutError):
        far.recv(100)
    wire.heal(psutil.Process())
    far.settimeout(60)
    assert far.recv(100) == b"late"


def test_an_end_that_closes_closes_the_other(ends: tuple[Wire, socket.socket, socket.socket]) -> None:
    _, near, far = ends
    far.close()
    assert near.recv(100) == b""


def test_a_listener_that_ends_drops_no_connection_half_made() -> None:
    async def accepted_while_closing() -> None:
        ended = asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            ended.set()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()):
            # accepted in the second turn of the loop, given its transport in the third
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await close_server(server)
        await ended.wait()

    asyncio.run(accepted_while_closing())
    # a transport that nobody closed complains when it is collected
    gc.collect()

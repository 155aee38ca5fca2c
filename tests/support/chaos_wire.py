"""A forwarder between the parts of a cluster, which can cut a process off without a reset and heal it.

The parts listen on 127.0.0.1 and tell each other `HOST` (option `--advertise-host`): whatever one of the
watched processes listens on is listened on here too, by the same number, and passed on. While a process is
cut, its connections neither carry bytes nor end, as with a network that drops packets.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psutil

HOST = "127.0.0.77"
TARGET = "127.0.0.1"
SCAN_S = 0.15
READ_BYTES = 1 << 16


@dataclass(eq=False)
class Connection:
    """port: where the part that connected has its end. listens: pid of the part at the other end."""

    port: int
    listens: int
    open: asyncio.Event = field(default_factory=asyncio.Event)


class Wire:
    """watched: the processes to forward for, asked again and again. `start` before use, `stop` after."""

    def __init__(self, watched: Callable[[], Iterable[psutil.Process]]) -> None:
        self._watched = watched
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire", daemon=True)
        self._servers: dict[int, asyncio.Server] = {}
        self._connections: set[Connection] = set()
        self._cut: dict[int, psutil.Process] = {}
        self._scanning: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._thread.start()

        async def scan() -> None:
            self._scanning = asyncio.create_task(self._scan())

        asyncio.run_coroutine_threadsafe(scan(), self._loop).result()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self, process: psutil.Process) -> None:
        """From now on nothing passes between this process and any other."""
        self._loop.call_soon_threadsafe(self._set, process, True)

    def heal(self, process: psutil.Process) -> None:
        self._loop.call_soon_threadsafe(self._set, process, False)

    def _set(self, process: psutil.Process, cut: bool) -> None:
        if cut:
            self._cut[process.pid] = process
        else:
            self._cut.pop(process.pid, None)
        for connection in self._connections:
            self._adjust(connection)

    def _adjust(self, connection: Connection) -> None:
        cut = connection.listens in self._cut or any(
            connection.port in ports(process) for process in self._cut.values()
        )
        if cut:
            connection.open.clear()
        else:
            connection.open.set()

    async def _scan(self) -> None:
        while True:
            for process in await asyncio.to_thread(lambda: list(self._watched())):
                for port in listening(process) - set(self._servers):
                    await self._listen(port, process.pid)
            await asyncio.sleep(SCAN_S)

    async def _listen(self, port: int, pid: int) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._forward(reader, writer, port, pid)
            finally:
                self._tasks.discard(task)
                writer.close()

        with contextlib.suppress(OSError):
            self._servers[port] = await asyncio.start_server(accept, HOST, port)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, pid: int
    ) -> None:
        connection = Connection(writer.get_extra_info("peername")[1], pid)
        self._connections.add(connection)
        self._adjust(connection)
        try:
            await connection.open.wait()
            onward, back = await asyncio.open_connection(TARGET, port)
        except OSError:
            self._connections.discard(connection)
            # nobody listens there any more; another process may, later
            if (server := self._servers.pop(port, None)) is not None:
                await close_server(server)
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, back, connection))
                both.create_task(_pump(onward, writer, connection))
        except* OSError:
            pass
        finally:
            back.close()
            self._connections.discard(connection)

    async def _stop(self) -> None:
        for server in self._servers.values():
            await close_server(server)
        tasks = [*self._tasks, *([self._scanning] if self._scanning is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # transports are closed by callbacks
        await asyncio.sleep(0.05)


async def close_server(server: asyncio.Server) -> None:
    """What was accepted just now gets its transport first: a server that is closed between drops it open."""
    for listener in server.sockets:
        asyncio.get_running_loop().remove_reader(listener)
    await asyncio.sleep(0)
    server.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: Connection) -> None:
    """Until one side ends, which ends both."""
    while data := await reader.read(READ_BYTES):
        await connection.open.wait()
        writer.write(data)
        await writer.drain()
    await connection.open.wait()
    raise ConnectionResetError


def listening(process: psutil.Process) -> set[int]:
    return {
        c.laddr.port for c in _connections(process) if c.status == psutil.CONN_LISTEN and c.laddr.ip == TARGET
    }


def ports(process: psutil.Process) -> set[int]:
    return {c.laddr.port for c in _connections(process) if c.status != psutil.CONN_LISTEN}


def _connections(process: psutil.Process) -> list[psutil._common.pconn]:
    try:
        return process.net_connections("tcp4")
    except psutil.Error:
        return []

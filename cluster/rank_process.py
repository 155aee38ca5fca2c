"""One life of a worker's rank process: start it, talk with it, end it.

The process is known by name only (`decodefleet.worker.rank`), so that nothing of the engine is imported here.
Each life has a file socket of its own: no word of an earlier life can be taken for one of this. What the
messages mean, and whether to start another life, is `replica.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from decodefleet.worker.config import WorkerConfig
from decodefleet.worker.logs import LogFormat, message_of
from decodefleet.worker.protocol import ToSupervisor
from decodefleet.worker.transport import Codec, PeerUnreachable, ProtocolError, Security, bind

from .scratch import ScratchFolder

END_S = 3.0
LAST_WORDS_S = 0.1
LOG_TAIL_BYTES = 2000


class RankProcess:
    """Made by a running event loop, used by it only. `close` is due even where `messages` ended."""

    def __init__(
        self,
        config: WorkerConfig,
        env: Mapping[str, str],
        security: Security | None,
        *,
        log_level: str,
        log_format: LogFormat,
        log_file: Path | None,
    ) -> None:
        """Starts the process; `log_file` gets what it prints, where None our own output does."""
        self._log_file = log_file
        self._codec: Codec[ToSupervisor] = Codec(ToSupervisor)
        self._folder = ScratchFolder("decodefleet-rank-", log_file.parent if log_file is not None else None)
        self._context = zmq.asyncio.Context()
        self._identity: bytes | None = None
        folder = self._folder.path
        self._socket, endpoint = bind(self._context, zmq.ROUTER, f"ipc://{folder / 'supervisor'}", security)
        config = config.model_copy(update={"supervisor": endpoint})
        file = folder / "worker.json"
        file.write_text(config.model_dump_json())
        self._process = _spawn(_command(file, log_level, log_format), env, log_file)
        self._exited = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._exited.done()

    async def messages(self) -> AsyncIterator[ToSupervisor]:
        """All that it says; ends with the process. What cannot be read is skipped."""
        while True:
            frames = await self._next_frames()
            if frames is None:
                return
            self._identity = frames[0]
            with contextlib.suppress(ProtocolError):
                yield self._codec.decode(frames[-1])

    async def send(self, message: msgspec.Struct) -> None:
        """Raises PeerUnreachable where it is gone, or has not spoken yet."""
        if self._identity is None:
            raise PeerUnreachable(full=False)
        try:
            await self._socket.send_multipart((self._identity, self._codec.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerUnreachable(full=isinstance(error, zmq.Again)) from error

    async def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, after at most `timeout_s`."""
        await asyncio.wait({self._exited}, timeout=timeout_s)
        return not self.alive

    def epitaph(self) -> str:
        """Why it ended, as far as its exit status and the end of its log tell."""
        code = self._process.returncode
        if code is None:
            return "the rank process is running"
        end = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        last = message_of(_last_line(self._log_file))
        return f"the rank process ended with {end}{hint}" + (f": {last}" if last else "")

    async def end(self) -> None:
        """TERM, then KILL, for the process and all it started; returns when it is gone."""
        self._signal(signal.SIGTERM)
        await self.wait(END_S)
        self._signal(signal.SIGKILL)
        await self.wait(END_S)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def close(self) -> None:
        """End it and give back what its life took here."""
        await self.end()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._context.destroy(linger=0)
        self._folder.close()

    async def _next_frames(self) -> list[bytes] | None:
        """None once it has ended and all it said was read."""
        receiving = asyncio.ensure_future(self._socket.recv_multipart())
        try:
            await asyncio.wait({receiving, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            # its last words may still be on their way
            await asyncio.wait({receiving}, timeout=LAST_WORDS_S)
            frames: list[bytes] | None = receiving.result() if receiving.done() else None
            return frames
        finally:
            receiving.cancel()

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._process.wait()
        if not self._exited.done():
            self._exited.set_result(None)


def rank_environment(threads: int | None, secret: str | None) -> dict[str, str]:
    """Ours, with what a rank must have: threads that sleep while they wait, and the cluster secret."""
    # Ray sets OMP_NUM_THREADS to the actor's CPUs; the number of threads is for the engine to decide
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    env["OMP_WAIT_POLICY"] = "PASSIVE"
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    if secret is not None:
        env["DECODEFLEET_CLUSTER_SECRET"] = secret
    return env


def _command(config: Path, log_level: str, log_format: LogFormat) -> list[str]:
    options = {
        "--config": str(config),
        "--log-level": log_level,
        "--log-format": log_format,
        "--parent": str(os.getpid()),
    }
    return [sys.executable, "-m", "decodefleet.worker.rank", *chain.from_iterable(options.items())]


def _spawn(command: list[str], env: Mapping[str, str], log_file: Path | None) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as stack:
        output: Any = stack.enter_context(log_file.open("ab")) if log_file is not None else None
        return subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            # a group of its own: it is ended with all it started, and a terminal's Ctrl-C passes it by
            start_new_session=True,
        )


def _last_line(file: Path | None) -> str:
    if file is None or not file.exists():
        return ""
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - LOG_TAIL_BYTES))
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""

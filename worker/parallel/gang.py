"""The other ranks of a model, as rank 0 sees them: processes that it starts, leads, watches and ends.

They live and die together: one that ends is a loss of all, and they end when rank 0 is gone, by whatever way
it went. Knows processes and sockets; what the orders mean is the runner's, and what a follower does is
`follower.py`'s, which is known by name only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from decodefleet.kernels.ops import ExchangeMemory

from ..assets.errors import ModelError
from ..config import EngineConfig, FollowerConfig
from ..engine_api import RankLost
from .answers import MESSAGE_BYTES, AnswerReader
from .channel import Array, Sender, make_memory
from .orders import Order

log = logging.getLogger(__name__)

MODULE = "decodefleet.worker.follower"
END_S = 3.0
WATCH_S = 0.1


OnLoss = Callable[[str], None]
"""Told who was lost, and how."""


def ignore_loss(reason: str) -> None:
    """For who learns of it by the next step's failure."""


class News(msgspec.Struct, frozen=True):
    """A follower's word at its start: that it is there, that it has loaded, or what stopped it."""

    error: str | None = None
    advice: str = ""


class Gang:
    """store: file by which the ranks find each other. exchange: memory in which CPUs add up numbers, if any.

    on_loss: told once, by another thread, who was lost.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_len: int,
        on_loss: OnLoss = ignore_loss,
        exchange: ExchangeMemory | None = None,
    ) -> None:
        """Starts the processes; returns when all have come to life. Raises ModelError where one does not."""
        # files without a name, that the followers inherit under the same number
        self._store = os.memfd_create("decodefleet-store")
        self._exchange = exchange
        self.store = Path(f"/proc/self/fd/{self._store}")
        self._on_loss = on_loss
        self._closing = threading.Event()
        self._sockets: list[socket.socket] = []
        self._answers = AnswerReader()
        self._processes: list[subprocess.Popen[bytes]] = []
        memory = make_memory()
        try:
            for rank in range(1, config.runner.tensor_parallel_size):
                places = {"store": self.store, "exchange": self.exchange}
                self._start(FollowerConfig(engine=config, rank=rank, max_len=max_len, **places), memory)
            self._hear_all()
            self._sender = Sender(memory, self._sockets)
        except BaseException:
            self._end()
            raise
        finally:
            os.close(memory)
        self._watch = threading.Thread(target=self._watch_processes, name="rank-watch", daemon=True)
        self._watch.start()

    @property
    def exchange(self) -> int | None:
        """Its descriptor, in all ranks."""
        return None if self._exchange is None else self._exchange.fd

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def await_loaded(self) -> None:
        """Raises ModelError where a rank cannot load its part."""
        self._hear_all()

    def send(self, numbers: Sequence[int], arrays: Sequence[Array]) -> None:
        """To all. Raises RankLost."""
        self._sender.send(numbers, arrays)

    def hear(self, timeout_s: float = 0.0) -> list[bytes]:
        """What ranks have sent beside their receipts; waits up to the timeout for the first of it.

        Raises RankLost where one is gone.
        """
        return self._answers.hear(timeout_s)

    def close(self) -> None:
        """Returns when all have ended, of their own accord or not."""
        if not self._closing.is_set():
            self._closing.set()
            for each in self._sockets:
                each.settimeout(END_S)
            with contextlib.suppress(RankLost):
                self.send([Order.END], [])
            self._end()

    def _start(self, config: FollowerConfig, memory: int) -> None:
        ours, theirs = _socket_pair()
        answers, their_answers = _socket_pair()
        self._sockets.append(ours)
        self._answers.add(answers)
        with theirs, their_answers:
            told = theirs.fileno(), memory, their_answers.fileno()
            inherited = (*told, self._store, *(() if self.exchange is None else (self.exchange,)))
            command = [sys.executable, "-m", MODULE, *map(str, told)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)
        self._processes.append(process)
        ours.send(config.model_dump_json().encode())

    def _hear_all(self) -> None:
        for rank, each in enumerate(self._sockets, start=1):
            patience = each.gettimeout()
            # loading takes as long as it takes; a rank that ends meanwhile closes its socket
            each.settimeout(None)
            words = each.recv(MESSAGE_BYTES)
            each.settimeout(patience)
            if not words:
                raise ModelError(
                    f"Rank {rank} of the model {_end_of(self._processes[rank - 1])} while it was loading.",
                    "See the log for its last words; it may have run out of memory.",
                )
            news = msgspec.json.decode(words, type=News)
            if news.error is not None:
                raise ModelError(news.error, news.advice)

    def _watch_processes(self) -> None:
        """Until they are ended by us, or the first one ends otherwise."""
        while not self._closing.wait(WATCH_S):
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None and not self._closing.is_set():
                    reason = f"rank {rank} of the model {_end_of(process)}"
                    log.error("%s", reason)
                    if self._exchange is not None:
                        self._exchange.abort()
                    self._on_loss(reason)
                    return

    def _end(self) -> None:
        deadline = time.monotonic() + END_S
        for each in self._sockets:
            each.close()
        self._answers.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        os.close(self._store)
        if self._exchange is not None:
            self._exchange.close()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    code = process.returncode
    if code is None:
        return "hung up"
    return f"ended with exit code {code}" if code >= 0 else f"ended with {signal.Signals(-code).name}"

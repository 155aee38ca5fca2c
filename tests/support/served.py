"""`decodefleet serve` started as a user starts it, and its processes by what they are.

Processes are found below the command's own by the titles that they give themselves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from decodefleet.cluster.processes import free_ports

COMMAND = [sys.executable, "-c", "from decodefleet.cluster.cli import main; main()"]
FOR_TESTS = ("DECODEFLEET_LONG", "DECODEFLEET_TEST_")
ROLES = {
    "rank": "-m decodefleet.worker.rank",
    "follower": "-m decodefleet.worker.follower",
    "supervisor": "ray::ServeReplica:decodefleet:worker",
    "scheduler": "ray::ServeReplica:decodefleet:scheduler",
    "router": "ray::ServeReplica:decodefleet:router",
    "redis": "redis-server ",
    "controller": "ray::ServeController",
    "proxy": "bin/haproxy ",
    "proxy manager": "ray::HAProxyManager",
    "raylet": "/raylet/raylet ",
    "gcs": "/gcs/gcs_server ",
}


class Served:
    """A running server, in a process group of its own as from a terminal."""

    def __init__(
        self,
        log: Path,
        *options: str,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = COMMAND,
    ) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [*program, "serve", "--port", str(self.port), *options]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                # behind a proxy, as many a machine is: nothing of ours may ask it for this machine
                env=_environment() | {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""} | (env or {}),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.seen: dict[int, psutil.Process] = {}

    def wait_ready(self) -> None:
        while not self.answers("/ready"):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def answers(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def descendants(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.seen |= {process.pid: process for process in found}
        return found

    def named(self, words: str) -> list[psutil.Process]:
        return [process for process in self.descendants() if words in command_line(process)]

    def census(self) -> dict[str, list[psutil.Process]]:
        """Living processes by role, the oldest first."""
        lines = {process: command_line(process) for process in self.descendants()}
        return {
            role: sorted(
                (process for process, line in lines.items() if words in line),
                key=lambda process: process.create_time(),
            )
            for role, words in ROLES.items()
        }

    def listening(self, role: str) -> set[tuple[str, int]]:
        """The TCP addresses at which the processes of a role take connections."""
        return {
            (connection.laddr.ip, connection.laddr.port)
            for process in self.census()[role]
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }

    def stop(self) -> int:
        """As Ctrl-C does: SIGINT to the group, once."""
        self.descendants()
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait()


def _environment() -> dict[str, str]:
    """Ours without what tells the tests something, which the server would refuse as a misspelt option."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FOR_TESTS)}


def command_line(process: psutil.Process) -> str:
    """Empty for one that is gone, or dead and not reaped."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""

"""A Ray cluster of two nodes on this machine, each with a raylet, an environment and files of its own."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import psutil
from served import command_line

from decodefleet.cluster.local_ray import environment
from decodefleet.cluster.processes import end_processes, free_ports


class Node:
    """One `ray start`; all that Ray starts for it are its descendants."""

    def __init__(self, folder: Path, *options: str, cpus: int, token: str) -> None:
        folder.mkdir()
        self.env = environment(folder, drain_s=2.0) | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        with (folder / "ray.log").open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--num-cpus", str(cpus), "--object-store-memory", str(100 << 20)],
                env=os.environ | self.env,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def named(self, words: str) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if words in command_line(process)]


class TwoNodes:
    """Each node has CPUs for `cpus` workers; `head` has GCS. `folder` must have a short path, for sockets."""

    def __init__(self, folder: Path, cpus: int) -> None:
        token = secrets.token_hex(16)
        port = str(free_ports(1)[0])
        self.address = f"127.0.0.1:{port}"
        head = ("--head", "--port", port, "--include-dashboard", "false", "--temp-dir", str(folder / "ray"))
        self.head = Node(folder / "head", *head, cpus=cpus, token=token)
        self._folder, self._cpus, self._token = folder, cpus, token
        self._nodes = [self.head]
        self.start_other()

    def start_other(self) -> None:
        """The second node, or another in its place."""
        self.other = Node(
            self._folder / f"other-{len(self._nodes)}",
            *("--address", self.address),
            cpus=self._cpus,
            token=self._token,
        )
        self._nodes.append(self.other)

    def stop(self) -> None:
        found = [psutil.Process(node.process.pid) for node in reversed(self._nodes)]
        family = [child for node in found for child in node.children(recursive=True)]
        end_processes([*found, *family])
        for node in self._nodes:
            node.process.wait()

"""The processes and connections that a drain waits for. Ray's part is played by processes of its names."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from decodefleet.cluster import node_drain
from decodefleet.cluster.node_drain import NodeNotDrained

RAYLET = ["/opt/ray/core/src/ray/raylet/raylet", "--raylet_socket_name=x", "--node_id=abc123", "--head"]


@contextmanager
def process(title: str) -> Iterator[None]:
    """A process whose list entry says `title`."""
    with subprocess.Popen([title, "60"], executable="/bin/sleep") as running:
        try:
            yield
        finally:
            running.kill()


def test_the_raylet_tells_the_node_that_it_is() -> None:
    others = [["python", "--node_id=agent"], [], ["/usr/bin/raylet-like", "--node_id=wrong"]]
    assert node_drain.node_id([*others, RAYLET]) == "abc123"
    assert node_drain.node_id(others) is None


def test_replicas_are_found_among_the_processes_and_gone_when_they_end() -> None:
    title = f"ray::ServeReplica:decodefleet:router-{os.getpid()}"
    with process(title):
        assert title in node_drain.replicas(node_drain.command_lines())
    assert title not in node_drain.replicas(node_drain.command_lines())


def test_clients_are_those_connected_to_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert list(node_drain.clients(port)) == []
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0]:
            assert list(node_drain.clients(port)) == [client.getsockname()]


def drained_while(
    monkeypatch: pytest.MonkeyPatch, port: int, *, limit_s: float, unroute_s: float = 0.0
) -> tuple[bool, float]:
    """Whether the node was drained, and the limit that Ray heard of."""
    heard: list[float] = []
    monkeypatch.setattr(node_drain, "announce", heard.append)
    # other tests on this machine may run Ray
    monkeypatch.setattr(node_drain, "command_lines", lambda: iter([RAYLET]))
    monkeypatch.setattr(node_drain, "POLL_S", 0.01)
    return node_drain.drain_node(limit_s=limit_s, unroute_s=unroute_s, http_port=port), heard[0]


def test_a_connection_holds_the_node_until_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            assert drained_while(monkeypatch, port, limit_s=0.1) == (False, 0.1)
        assert drained_while(monkeypatch, port, limit_s=60.0) == (True, 60.0)


def test_an_empty_node_waits_until_everybody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drained_while(monkeypatch, 1, limit_s=0.1, unroute_s=60.0) == (False, 0.1)
    assert drained_while(monkeypatch, 1, limit_s=60.0, unroute_s=0.1) == (True, 60.0)


def test_a_machine_without_ray_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(node_drain, "command_lines", lambda: iter(()))
    with pytest.raises(NodeNotDrained, match="no raylet"):
        node_drain.announce(1.0)
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(NodeNotDrained, match="RAY_ADDRESS"):
        node_drain.announce(1.0)

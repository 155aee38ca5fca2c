"""Empties this node of a Ray cluster before it goes: what a pod runs before it is stopped.

Ray is told that the node goes; Serve then starts replacements elsewhere, and ends the replicas here, which
drain as they always do. Runs beside the raylet of the node, in the environment in which that was started.
Knows nothing of requests: it waits for processes and connections to go.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence

import psutil

REPLICA = "ray::ServeReplica"
NODE_ID = "--node_id="
POLL_S = 0.5
ASK_S = 5.0


class NodeNotDrained(RuntimeError):
    """Ray does not know the node, or cannot be asked."""


def drain_node(*, limit_s: float, unroute_s: float, http_port: int) -> bool:
    """Whether the node is empty, after at most `limit_s`, and not before `unroute_s`.

    limit_s is also what Serve is told: a replica that takes longer is ended. unroute_s: until then others may
    still send requests here, whatever they were told. Raises NodeNotDrained.
    """
    began = time.monotonic()
    announce(limit_s)
    while time.monotonic() - began < limit_s:
        waited = time.monotonic() - began >= unroute_s
        if waited and not any(replicas(command_lines())) and not any(clients(http_port)):
            return True
        time.sleep(POLL_S)
    return False


def announce(limit_s: float) -> None:
    """Tells Ray's head that this node ends in `limit_s`. Raises NodeNotDrained."""
    from ray import NodeID
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    address, node = os.environ.get("RAY_ADDRESS"), node_id(command_lines())
    if address is None or node is None:
        raise NodeNotDrained("RAY_ADDRESS is not set" if address is None else "no raylet runs here")
    deadline_ms = time.time_ns() // 1_000_000 + int(limit_s * 1000)
    try:
        accepted, reason = GcsClient(address=address).drain_node(
            NodeID.from_hex(node).hex(), DRAIN_NODE_REASON_PREEMPTION, "the pod ends", deadline_ms, ASK_S
        )
    except Exception as error:
        raise NodeNotDrained(f"{address} cannot be asked: {error}") from error
    if not accepted:
        raise NodeNotDrained(reason)


def command_lines() -> Iterator[Sequence[str]]:
    """Of all processes that can be seen, each once."""
    for process in psutil.process_iter(["cmdline"]):
        yield process.info["cmdline"] or ()


def node_id(lines: Iterable[Sequence[str]]) -> str | None:
    """Ray's id of this node, as its raylet was told it."""
    for line in lines:
        if line and os.path.basename(line[0]) == "raylet":
            for argument in line:
                if argument.startswith(NODE_ID):
                    return argument.removeprefix(NODE_ID)
    return None


def replicas(lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """Titles of Serve's replicas."""
    return (line[0] for line in lines if line and line[0].startswith(REPLICA))


def clients(port: int) -> Iterator[tuple[str, int]]:
    """Addresses of those who have a connection to the HTTP port here."""
    for connection in psutil.net_connections("tcp"):
        established = connection.status == psutil.CONN_ESTABLISHED
        if established and connection.laddr and connection.laddr.port == port and connection.raddr:
            yield connection.raddr.ip, connection.raddr.port

"""A whole node goes away, with the workers on it, and comes back: two raylets on this machine."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_cluster import BREAKS, GOES_ON, Cluster, Scenario, disturb
from chaos_nodes import TwoNodes
from chaos_report import REPEAT, SEED, outcomes
from chaos_streams import Length

from decodefleet.cluster.embedded_redis import EmbeddedRedis

STREAMS = 20

pytestmark = pytest.mark.chaos


class NodesCluster(Cluster):
    """Its processes are the nodes', so that only the fleet's metrics tell whether all is as before."""

    def unsettled(self) -> list[str]:
        return self.unsettled_fleet()


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    # sockets have short paths
    folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))
    nodes = TwoNodes(folder, cpus=1)
    yield nodes
    nodes.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(smollm2: Path, tmp_path: Path, nodes: TwoNodes) -> Iterator[NodesCluster]:
    with EmbeddedRedis() as redis:
        cluster = NodesCluster(
            tmp_path,
            str(smollm2),
            Length(150, 300),
            workers=2,
            wired=False,
            env=nodes.head.env | {"DECODEFLEET_CLUSTER_SECRET": "known to both nodes"},
            fake=True,
            fake_step_base_s=0.01,
            address=nodes.address,
            redis_url=redis.url,
        )
        cluster.start()
        yield cluster
        cluster.stop()


@pytest.mark.parametrize("repetition", range(REPEAT))
def test_a_lost_node_takes_no_stream_along_but_those_of_its_router(
    cluster: NodesCluster, nodes: TwoNodes, repetition: int
) -> None:
    def strike(_: Cluster, __: random.Random) -> str:
        (raylet,) = nodes.other.named("/raylet/raylet ")
        raylet.kill()
        nodes.start_other()
        return f"killed raylet {raylet.pid}"

    routers = nodes.other.named("ServeReplica:decodefleet:router")
    scenario = Scenario("raylet of a second node", strike, streams=BREAKS if routers else GOES_ON)
    outcome = disturb(cluster, scenario, SEED + repetition, STREAMS)
    outcomes.append(outcome)
    print(f"\n{outcome}", flush=True)
    assert outcome.faults == []
    assert outcome.equal

"""The chart's pods as namespaces on this machine: the head dies and comes back, a pod is drained."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_streams import Answer, Length, Transcript, make_requests, run_streams
from chart_pods import NETWORK, PASSWORD, ChartCluster, missing, network, pre_stop
from helm_chart import render
from redis_servers import run_redis
from waiting import until

from decodefleet.cluster.processes import free_ports

MODEL = "smollm2-135m"
STREAMS = 20
HEAD_AWAY_S = 20.0

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif("DECODEFLEET_LONG" not in os.environ, reason="minutes: DECODEFLEET_LONG=1 runs it"),
    pytest.mark.skipif(missing() is not None, reason=f"NOT TESTED: {missing()}"),
]


def values(model: Path) -> dict[str, object]:
    options = {"fake": True, "fake_step_base_s": 0.01, "threads": 1}
    served = {"name": MODEL, "model": str(model), "device": "cpu", "replicas": 2, "options": options}
    return {
        "models": [served],
        "router": {"replicas": 2},
        "apiKeys": {"enabled": False},
        "drainSeconds": 30,
        "unrouteSeconds": 2,
    }


@pytest.fixture(scope="module")
def cluster(smollm2: Path) -> Iterator[ChartCluster]:
    (port,) = free_ports(1)
    options = ("--bind", f"{NETWORK}.1", "127.0.0.1", "--requirepass", PASSWORD)
    # pods see this folder beside a /tmp of their own
    home = tempfile.TemporaryDirectory(prefix="pods-", dir=Path.home(), ignore_cleanup_errors=True)
    with home as name, network() as bridge, run_redis(folder := Path(name), port, *options):
        cluster = ChartCluster(render(values(smollm2)), bridge, folder, (f"{NETWORK}.1", port))
        try:
            cluster.start()
            cluster.deploy()
            until(cluster.settled, look_s=0.5)
            yield cluster
        finally:
            cluster.stop()


class Load:
    """Streams at one router, over and over until told to end; with `once` in a single round."""

    def __init__(self, url: str, seed: int, once: bool = False) -> None:
        self._url, self._requests = url, make_requests(seed, STREAMS, MODEL, Length(150, 300))
        self.expected = [one.answer() for one in asyncio.run(run_streams(url, self._requests))]
        self._once, self._ends = once, threading.Event()
        self.rounds: list[list[Transcript]] = []
        self._thread = threading.Thread(target=self._go_on)

    def __enter__(self) -> Load:
        self._thread.start()
        time.sleep(1.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._ends.is_set():
            self.rounds.append(asyncio.run(run_streams(self._url, self._requests)))
            if self._once:
                return

    def faults(self) -> list[str]:
        """What is not as in peace."""
        found = []
        for number, transcripts in enumerate(self.rounds):
            for transcript in transcripts:
                wanted: Answer = self.expected[transcript.request.number]
                try:
                    if transcript.answer() != wanted:
                        found.append(f"round {number}, stream {transcript.request.number}: another text")
                except ValueError as error:
                    found.append(f"round {number}, stream {transcript.request.number}: {error}")
        return found


def url_of(cluster: ChartCluster, router: int) -> str:
    return f"http://{cluster.pods['routers'][router].ip}:8000"


def replicas(cluster: ChartCluster) -> set[str]:
    return {
        replica["replica_id"]
        for application in cluster.applications().values()
        for deployment in application["deployments"].values()
        for replica in deployment["replicas"]
        if replica["state"] == "RUNNING"
    }


def test_probes_answer_what_they_should(cluster: ChartCluster) -> None:
    for name, found in cluster.pods.items():
        for pod in found:
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                until(lambda name=name, pod=pod, kind=kind: cluster.probe(name, pod, kind) == 200)


def test_the_head_may_go_and_come_back_under_streams(cluster: ChartCluster) -> None:
    before = replicas(cluster)
    with Load(url_of(cluster, 0), seed=1) as load:
        assert cluster.head is not None
        cluster.head.kill()
        gone = time.monotonic()
        while time.monotonic() - gone < HEAD_AWAY_S:
            for name, found in cluster.pods.items():
                for pod in found:
                    for kind in ("livenessProbe", "readinessProbe"):
                        # what fails them ends pods that serve
                        assert cluster.probe(name, pod, kind) == 200, (name, kind)
            time.sleep(1.0)
        pod = cluster.pods[MODEL][1]
        (rank,) = pod.named("decodefleet.worker.rank")
        rank.kill()
        # its supervisor starts another without asking anybody
        until(lambda: rank.pid not in [other.pid for other in pod.named("decodefleet.worker.rank") or [rank]])
        until(lambda: cluster.probe(MODEL, pod, "readinessProbe") == 200)
        until(cluster.settled, look_s=0.5)
        time.sleep(2.0)
    assert load.faults() == []
    assert len(load.rounds) > 2
    assert replicas(cluster) == before


def drain(cluster: ChartCluster, name: str, number: int) -> None:
    """Ends a pod as Kubernetes does: what it runs before it stops has to find it empty."""
    pod = cluster.pods[name].pop(number)
    ending = pre_stop(cluster, name, pod)
    printed, _ = ending.communicate(timeout=120)
    pod.kill()
    assert ending.returncode == 0, printed


def test_a_worker_pod_is_drained_under_streams(cluster: ChartCluster) -> None:
    cluster.start_pod(MODEL)
    before = replicas(cluster)
    with Load(url_of(cluster, 0), seed=2) as load:
        drain(cluster, MODEL, 0)
        until(lambda: cluster.settled() and len(replicas(cluster)) == len(before), look_s=0.5)
    assert load.faults() == []
    assert len(replicas(cluster) & before) == len(before) - 1


def test_a_router_pod_is_drained_with_its_streams(cluster: ChartCluster) -> None:
    cluster.start_pod("routers")
    before = replicas(cluster)
    own = Load(url_of(cluster, 0), seed=3, once=True)
    with Load(url_of(cluster, 1), seed=4) as others:
        with own:
            drain(cluster, "routers", 0)
        until(lambda: cluster.settled() and len(replicas(cluster)) == len(before), look_s=0.5)
    assert own.faults() == []
    assert others.faults() == []

"""What is done to a cluster: one function per kind of death, and the table of scenarios."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import psutil
from chaos_cluster import ALL_ANEW_S, BREAKS, SOME_BREAK, Cluster, Scenario
from chaos_redeploy import redeploy
from waiting import until

Strike = Callable[[Cluster, random.Random], str]

# longer than a worker may be silent before it is taken for lost
ABSENCE_S = 6.0


def kill(*roles: str, count: int = 1) -> Strike:
    """SIGKILL for `count` processes of each role, all at once."""

    def strike(cluster: Cluster, rng: random.Random) -> str:
        census = cluster.served.census()
        victims = [process for role in roles for process in rng.sample(census[role], count)]
        for victim in victims:
            victim.kill()
        return "killed " + ", ".join(str(victim.pid) for victim in victims)

    return strike


def replace_proxy(cluster: Cluster, rng: random.Random) -> str:
    """Kills what minds HAProxy; waits until its successor has another one take over, seconds later."""
    old = {proxy.pid for proxy in cluster.of("proxy")}
    struck = kill("proxy manager")(cluster, rng)
    until(lambda: bool({proxy.pid for proxy in cluster.of("proxy")} - old))
    return struck


def freeze(role: str) -> Strike:
    """SIGSTOP, and SIGCONT when everybody has given it up."""

    def strike(cluster: Cluster, rng: random.Random) -> str:
        victim = rng.choice(cluster.of(role))
        victim.suspend()
        time.sleep(ABSENCE_S)
        victim.resume()
        return f"froze {victim.pid} for {ABSENCE_S:g} s"

    return strike


def cut_off(cluster: Cluster, rng: random.Random) -> str:
    """No byte to or from one worker for a while, and no reset."""
    victim = rng.choice(cluster.of("rank"))
    cluster.wire.cut(victim)
    time.sleep(ABSENCE_S)
    cluster.wire.heal(victim)
    return f"cut off {victim.pid} for {ABSENCE_S:g} s"


def terminate(role: str) -> Strike:
    """SIGTERM, as an operator or a container runtime would."""

    def strike(cluster: Cluster, rng: random.Random) -> str:
        victim: psutil.Process = rng.choice(cluster.of(role))
        victim.send_signal(signal.SIGTERM)
        return f"terminated {victim.pid}"

    return strike


def one_after_another(*strikes: Strike) -> Strike:
    def strike(cluster: Cluster, rng: random.Random) -> str:
        done = []
        for one in strikes:
            done.append(one(cluster, rng))
            time.sleep(rng.uniform(0.1, 0.6))
        return ", then ".join(done)

    return strike


def roll(cluster: Cluster, rng: random.Random) -> str:
    """Every replica is replaced by one of another configuration, as in an upgrade."""
    old = _replicas(cluster)
    # whatever it is now, another one
    cluster.options["max_queue"] = 1000 + rng.randrange(1000)
    redeploy(cluster)
    until(lambda: not old & _replicas(cluster) and len(cluster.of("rank")) == cluster.workers)
    return f"replaced {len(old)} replicas"


def scale(cluster: Cluster, rng: random.Random) -> str:
    """One worker fewer, and back."""
    redeploy(cluster, workers=cluster.workers - 1)
    until(lambda: len(cluster.of("rank")) == cluster.workers - 1)
    time.sleep(rng.uniform(0.0, 0.5))
    redeploy(cluster)
    until(lambda: len(cluster.of("rank")) == cluster.workers)
    return "scaled down and up"


def _replicas(cluster: Cluster) -> set[int]:
    census = cluster.served.census()
    return {process.pid for role in ("rank", "scheduler", "router") for process in census[role]}


SCENARIOS = (
    Scenario("worker", kill("rank"), moves=True),
    Scenario("two workers at once", kill("rank", count=2), moves=True),
    Scenario("one rank of a worker", kill("follower"), moves=True, ranks=2),
    Scenario("worker terminated", terminate("rank"), moves=True),
    Scenario("supervisor", kill("supervisor"), moves=True),
    Scenario("scheduler", kill("scheduler")),
    Scenario("redis", kill("redis")),
    Scenario("redis frozen", freeze("redis")),
    Scenario("controller", kill("controller")),
    Scenario("proxy manager", replace_proxy),
    Scenario("worker frozen", freeze("rank"), moves=True),
    Scenario("worker cut off", cut_off, moves=True),
    Scenario(
        "worker, scheduler, redis and controller at once", kill("rank", "scheduler", "redis", "controller")
    ),
    Scenario(
        "redis, scheduler, worker, controller one after another",
        one_after_another(kill("redis"), kill("scheduler"), kill("rank"), kill("controller")),
    ),
    Scenario("scaled down and up", scale),
    Scenario("rolling update", roll),
    Scenario("router", kill("router"), streams=SOME_BREAK),
    Scenario("proxy", kill("proxy"), streams=BREAKS),
    # the last: they start all anew
    Scenario("gcs", kill("gcs"), streams=BREAKS, settle_s=ALL_ANEW_S),
    Scenario("raylet", kill("raylet"), streams=BREAKS, settle_s=ALL_ANEW_S),
)

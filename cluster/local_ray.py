"""A private Ray cluster on this machine, quiet and apart from any other: own folder, ports and token.

Everything that Ray and Serve read from the environment is set here, before the first import of ray; modules
that import ray are imported after `prepare` only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import time
from pathlib import Path

import psutil

from . import http_proxy
from .processes import free_ports

OBJECT_STORE_BYTES = 100 << 20
# a router that leaves takes requests for so long: Serve stops the last old one in the moment in which the
# first new one is up, and HAProxy hears of both half a second later, on a busy machine two
UNROUTE_S = 2.0
DELETE_POLL_S = 0.2
LONGEST_STREAM_S = 7 * 24 * 3600
# without them nothing that dies is started again
ESSENTIAL = ("gcs_server", "raylet")


def prepare(folder: Path, drain_s: float, pem: bytes | None = None) -> None:
    """Sets the environment of a private cluster that keeps its files in `folder`; pem: see `http_proxy`."""
    os.environ.update(environment(folder, drain_s, pem))
    os.environ.update(
        {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # on Linux as well: a node that joins no other is 127.0.0.1, and Ray's servers listen there only
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
    )


def environment(folder: Path, drain_s: float, pem: bytes | None = None) -> dict[str, str]:
    """What Ray and Serve shall find in the environment of a node that keeps its files in `folder`."""
    metrics, stats, http, grpc = free_ports(4)
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # an idle cluster must leave the cores to the model: nobody reads Ray's own metrics here
        "RAY_enable_metrics_collection": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(http_proxy.prepare(folder, pem)),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # a router that leaves may close a connection in the moment HAProxy uses it again, and the client's
        # would end without a word; whoever got no byte has not been answered by anybody
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # three failures in a row mark a router down; two more tries are for those who found that out
        "RAY_SERVE_HAPROXY_RETRIES": "5",
        # each change of the routers reloads HAProxy, and no stream shall end for that, however long it is
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
        # a dead HAProxy is replaced after three checks
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(UNROUTE_S),
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": str(UNROUTE_S),
        # how soon Serve hears what the scheduler wants of the number of workers
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        "RAY_SERVE_SHUTDOWN_TIER_TIMEOUT_S": str(drain_s + 30),
    }


def start(folder: Path, cpus: int) -> None:
    """Starts Ray. `prepare` comes first."""
    import ray

    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder / "ray"),
    )


def start_serve(host: str, port: int) -> None:
    """Starts Serve with its HTTP proxy on host:port, in the cluster that `start` made."""
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation

    serve.start(http_options=HTTPOptions(host=host, port=port), proxy_location=ProxyLocation.HeadOnly)


def essential_processes() -> dict[str, psutil.Process]:
    """Of the cluster that `start` made, by name."""
    return {child.name(): child for child in psutil.Process().children() if child.name() in ESSENTIAL}


def lost(processes: dict[str, psutil.Process]) -> str | None:
    """The name of one that is gone."""
    return next((name for name, process in processes.items() if _is_gone(process)), None)


def _is_gone(process: psutil.Process) -> bool:
    try:
        # nobody reaps it: it stays as a zombie
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def drain_proxy(limit_s: float) -> None:
    """Nothing new is let in; returns when what runs has finished, or at the limit. Needs nothing of Ray."""
    proxies = []
    for child in psutil.Process().children(recursive=True):
        # all that was Ray's ends in this moment
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "haproxy":
                child.send_signal(signal.SIGUSR1)
                proxies.append(child)
    psutil.wait_procs(proxies, timeout=limit_s)


def join(address: str, host: str, port: int) -> None:
    """Connects to a cluster that runs, and starts Serve there where it does not run yet."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    serve.start(http_options=HTTPOptions(host=host, port=port))


def leave() -> None:
    import ray

    ray.shutdown()


def delete_application(name: str, limit_s: float) -> None:
    """Unroutes, drains and ends an application's replicas; returns when they are gone, or at the limit."""
    from ray import serve

    serve.delete(name, _blocking=False)
    deadline = time.monotonic() + limit_s
    while name in serve.status().applications and time.monotonic() < deadline:
        time.sleep(DELETE_POLL_S)


def stop() -> None:
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()

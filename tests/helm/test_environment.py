"""The environment of pods: what `decodefleet serve` sets on one machine, image or chart sets there."""

from __future__ import annotations

from pathlib import Path

from dockerfile import image_environment
from helm_chart import containers, render

from decodefleet.cluster import local_ray

# files and ports of a cluster beside others on one machine, and Ray's metrics, which pods are asked for
ONE_MACHINE = {
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC",
    "RAY_SERVE_HAPROXY_SOCKET_PATH",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH",
    "RAY_enable_metrics_collection",
    # an idle cluster must leave one machine's cores to the model; here the controller has the head's
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S",
    # of the end of all Serve, which here is the end of the pods
    "RAY_SERVE_SHUTDOWN_TIER_TIMEOUT_S",
}
# a place in the image, and what the chart's values say
OTHER_VALUES = {
    "RAY_SERVE_HAPROXY_BINARY_PATH",
    "RAY_SERVE_HAPROXY_NBTHREAD",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S",
}


def test_pods_have_what_serve_sets_on_one_machine(tmp_path: Path) -> None:
    local = local_ray.environment(tmp_path, 1.0)
    for name, container in containers(render()):
        if not name.startswith(("head/ray-", "routers/", "smollm2-135m/")):
            continue
        chart = {entry["name"]: entry.get("value") for entry in container["env"]}
        pod = image_environment() | chart
        assert set(local) - ONE_MACHINE <= set(pod), name
        same = set(local) - ONE_MACHINE - OTHER_VALUES
        assert {key: pod[key] for key in same} == {key: local[key] for key in same}, name


def test_the_lists_name_what_there_is(tmp_path: Path) -> None:
    assert set(local_ray.environment(tmp_path, 1.0)) >= ONE_MACHINE | OTHER_VALUES

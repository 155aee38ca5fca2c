"""The chart's values: each has a default and a description, the README lists them, wrong ones are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_chart import CHART, ROOT, one, pods, render, template

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def properties(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        below: dict[str, Any] = SCHEMA["$defs"]["model"]["properties"]
        return below
    return schema.get("properties", {})


def described(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for name, below in properties(schema).items():
        yield f"{path}{name}", below.get("description", "")
        yield from described(below, f"{path}{name}.")


def given(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{path}{name}"
        below = properties(schema).get(name, {})
        if isinstance(value, dict) and properties(below):
            yield from given(value, below, f"{path}{name}.")


def test_every_value_is_described_and_has_a_default() -> None:
    known = dict(described(SCHEMA))
    assert [path for path, description in known.items() if not description.endswith(".")] == []
    defaults = set(given(VALUES, SCHEMA))
    assert defaults - set(known) == set()
    assert set(known) - defaults == {"global"}


def test_the_readme_lists_them() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "helm" / "values_table.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"drainSeconds": "long"}, "/drainSeconds"),
        ({"drainSecond": 3}, "drainSecond"),
        ({"models": []}, "/models"),
        ({"models": [{"name": "Upper", "model": "m"}]}, "/models/0/name"),
        ({"models": [{"name": "m"}]}, "missing property 'model'"),
        ({"models": [{"name": "m", "model": "m", "tensorParalelSize": 8}]}, "tensorParalelSize"),
        ({"modelDefaults": {"device": "tpu"}}, "/modelDefaults/device"),
        ({"models": [{"name": "m", "model": "m", "route": "no-slash"}]}, "/models/0/route"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"router": {"resources": {"request": {}}}}, "/router/resources"),
        ({"service": {"port": 0}}, "/service/port"),
        ({"redis": {"maxMemory": "512"}}, "/redis/maxMemory"),
        ({"modelCache": {"type": "nfs"}}, "/modelCache/type"),
        ({"modelCache": {"type": "hostPath"}}, "modelCache.hostPath"),
        ({"models": [{"name": "m", "model": "m"}] * 2}, "the name m is taken"),
        ({"models": [{"name": "routers", "model": "m"}]}, "the name routers is taken"),
        ({"models": [{"name": "a", "model": "m"}, {"name": "b", "model": "m"}]}, "two models have the route"),
        (
            {"router": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
            "minReplicas is above maxReplicas",
        ),
        (
            {"models": [{"name": "m", "model": "m", "options": {"ssl_certfile": "/tls.crt"}}]},
            "end TLS at ingress.tls",
        ),
        ({"redis": {"enabled": False}}, "redis.external.urlSecret.name"),
        ({"ray": {"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}}}, "ray.upgrade.gatewayClassName"),
        (
            {
                "ray": {"autoscaler": {"enabled": False}},
                "models": [{"name": "m", "model": "m", "autoscaling": {"enabled": True}}],
            },
            "models.m.autoscaling",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(values: dict[str, Any], complaint: str) -> None:
    done = template(values)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_an_external_redis_is_used_for_both() -> None:
    redis = {
        "enabled": False,
        "external": {
            "address": "redis.example:6379",
            "urlSecret": {"name": "redis", "key": "url"},
            "passwordSecret": {"name": "redis", "key": "password"},
        },
    }
    manifests = render({"redis": redis})
    assert not [manifest for manifest in manifests if manifest["kind"] == "StatefulSet"]
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == "redis://redis.example:6379"
    env = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    (url,) = (entry for entry in env if entry["name"] == "DECODEFLEET_REDIS_URL")
    assert url["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "url"}


def test_an_external_redis_may_speak_tls() -> None:
    external = {"address": "rediss://redis.example:6380", "urlSecret": {"name": "redis"}}
    cluster = one(render({"redis": {"enabled": False, "external": external}}), "RayService")["spec"]
    told = cluster["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    assert told == "rediss://redis.example:6380"


def test_every_pod_can_pull_from_a_private_registry() -> None:
    found = pods(render({"image": {"pullSecrets": [{"name": "registry"}]}}))
    assert {"head", "routers", "fleet-decodefleet-redis"} <= set(found)
    for name, pod in found.items():
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}], name


def test_an_ingress_and_a_route_lead_to_the_service() -> None:
    manifests = render(
        {
            "ingress": {"enabled": True, "hosts": ["llm.example.com"]},
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
        }
    )
    (rule,) = one(manifests, "Ingress")["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == "fleet-decodefleet"
    (rule,) = one(manifests, "HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "fleet-decodefleet", "port": 80}]


def test_both_are_off_unless_asked_for() -> None:
    kinds = {manifest["kind"] for manifest in render()}
    assert not kinds & {"Ingress", "HTTPRoute", "ServiceMonitor", "PodMonitor", "PrometheusRule"}

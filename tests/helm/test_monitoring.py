"""Alerts and dashboards reach the cluster as they lie in deploy/; what is scraped is what exists."""

from __future__ import annotations

import json

import pytest
import yaml
from helm_chart import CHART, ROOT, Manifest, containers, of_kind, one, render, serve_config

DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    parts = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
    models = [
        {"name": "small", "model": "org/small", "route": "/"},
        {"name": "large", "model": "org/large", "route": "/large"},
    ]
    return render({"monitoring": {part: {"enabled": True} for part in parts}, "models": models})


def test_the_files_are_links_so_that_there_is_one_of_each() -> None:
    assert (CHART / "files" / "dashboards").resolve() == ROOT / "deploy" / "grafana" / "dashboards"
    assert (CHART / "files" / "alerts.yaml").resolve() == ROOT / "deploy" / "prometheus" / "alerts.yaml"


def test_alerts_are_those_of_the_file(manifests: list[Manifest]) -> None:
    alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text(encoding="utf-8"))
    assert one(manifests, "PrometheusRule")["spec"] == alerts
    assert alerts["groups"]


def test_dashboards_are_those_of_the_folder(manifests: list[Manifest]) -> None:
    (shown,) = (
        found for found in of_kind(manifests, "ConfigMap") if found["metadata"]["name"].endswith("dashboards")
    )
    assert DASHBOARDS
    wanted = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS}
    assert {name: json.loads(text) for name, text in shown["data"].items()} == wanted
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_fleet_is_scraped_once_per_model(manifests: list[Manifest]) -> None:
    paths = [endpoint["path"] for endpoint in one(manifests, "ServiceMonitor")["spec"]["endpoints"]]
    assert paths == ["/metrics", "/large/metrics"]


def test_every_port_that_is_scraped_is_one_of_a_container(manifests: list[Manifest]) -> None:
    scraped = {endpoint["port"] for endpoint in one(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]}
    ports = {
        port["name"]: port["containerPort"]
        for name, container in containers(manifests)
        for port in container.get("ports", ())
    }
    assert scraped <= set(ports)
    for application in serve_config(manifests)["applications"]:
        assert application["args"]["metrics_port"] == ports["worker-metrics"]

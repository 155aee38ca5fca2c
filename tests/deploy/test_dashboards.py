"""Dashboards and alerts against what is exported: names, labels, syntax, and a page for each alert."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest
import yaml

from decodefleet.cluster.observability.exposition import Exposition, parse
from decodefleet.cluster.observability.router_metrics import MEASURES, RouterMetrics
from decodefleet.cluster.observability.timeline import Timeline
from decodefleet.cluster.scheduling.fleet_metrics import FleetMetrics, OwnCounters
from decodefleet.cluster.scheduling.scheduler import GlobalScheduler
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import ModelCard, Place, Register, TierStats, WorkerStats

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yaml"
# what Prometheus puts on every sample, or the operator's scrape configuration does
OUTSIDE = {"job", "instance", "namespace"}
CARD = ModelCard(
    name="m",
    folder="",
    max_model_len=100,
    vocab_size=50,
    block_size=16,
    hash_root=b"",
    kv_bytes_per_token=1,
)


def exported() -> Exposition:
    """The fleet's /metrics once everything that is counted has happened once."""
    core, metrics, router = GlobalScheduler(1), FleetMetrics(), RouterMetrics()
    stats = WorkerStats(
        total_blocks=10,
        finished={"stop": 1},
        evicted_blocks=1,
        tiers={"cpu": TierStats(total_blocks=5, evicted={"lost": 1})},
    )
    register = Register(worker_id="w", incarnation="i", endpoint="e", card=CARD, stats=stats)
    core.register(register, 0.0)
    core.hello("router", 0.0)
    core.place(Place(request_id="a", model="other", prompt_tokens=1, max_new_tokens=1), "router", 0.0)
    metrics.worker_report(WorkerKey("w", "i"), "m", stats)
    timeline = Timeline("a", "m", 1, router)
    timeline.failed(ValueError(), "worker_lost")
    timeline.closed()
    router.requests.labels("/health", "200").inc()
    for measure in MEASURES:
        router.distribution(measure, "m").observe(1.0)
    metrics.router_report("router", router.text())
    own = OwnCounters(malformed=1, unreachable={"full": 1}, directory_up=True, directory_lag_s=0.1)
    return parse(metrics.sample(core, own).render())


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """The labels of each sample name."""
    found: dict[str, set[str]] = {}
    for family in exported().families.values():
        for name, pairs in family.samples:
            found.setdefault(name, set()).update(key for key, _ in pairs)
    return found


@pytest.fixture(scope="module")
def module() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEPLOY / "grafana"))
        return importlib.import_module("dashboards")


def dashboards() -> list[Path]:
    return sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> dict[str, str]:
    """Every PromQL expression in deploy/, by where it stands; Grafana's variables filled in."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in rules()}
    for path in dashboards():
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                name = f"{path.stem} {panel['id']}{target['refId']}: {panel['title']}"
                assert name not in found
                found[name] = re.sub(r"\$(job|model)\b", ".*", target["expr"]).replace(
                    "$__rate_interval", "1m"
                )
    return found


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("lhs", "rhs", "expr", "args", "vector_selector", "param"):
        part = getattr(node, name, None)
        for child in part if isinstance(part, list) else [part]:
            if child is not None:
                yield from selectors(child)


def grouped(node: Any) -> set[str]:
    """Labels that any part of an expression is grouped or matched by."""
    text = node.prettify()
    lists = re.findall(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)", text)
    return {label.strip() for names in lists for label in names.split(",") if label.strip()}


@pytest.mark.parametrize(("where", "query"), queries().items(), ids=queries())
def test_every_query_asks_for_what_is_exported(where: str, query: str, labels: dict[str, set[str]]) -> None:
    parsed = promql_parser.parse(query)
    found = [*selectors(parsed)]
    assert found, where
    known = set(OUTSIDE)
    for selector in found:
        assert selector.name in labels, f"{selector.name} is exported by nobody"
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= labels[selector.name] | OUTSIDE, selector.name
        known |= labels[selector.name]
    assert grouped(parsed) <= known


def test_the_files_are_those_that_the_script_writes(module: ModuleType) -> None:
    written = {path.stem: path.read_text(encoding="utf-8") for path in dashboards()}
    assert written == {dashboard.uid: module.render(dashboard) for dashboard in module.DASHBOARDS}


def test_panels_lie_beside_each_other() -> None:
    for path in dashboards():
        taken: set[tuple[int, int]] = set()
        panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        for panel in panels:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            taken |= cells


def test_each_alert_says_what_it_means_and_what_to_do() -> None:
    page = (DEPLOY / "docs" / "operations.md").read_text(encoding="utf-8")
    names = [rule["alert"] for rule in rules()]
    assert len({*names}) == len(names)
    assert re.findall(r"^### (Decodefleet\w+)$", page, re.MULTILINE) == names
    for rule in rules():
        assert {*rule["annotations"]} == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert not re.search(r"\b(namespace|job)\s*(=|!)", rule["expr"])


def test_a_wrong_name_would_be_found(labels: dict[str, set[str]]) -> None:
    (selector,) = selectors(promql_parser.parse("sum(rate(decodefleet_nothing_total[5m])) > 0"))
    assert selector.name not in labels

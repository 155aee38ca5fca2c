"""Dashboards and alerts against what is exported: names, labels, syntax, and a page for each alert."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import promql_parser
import pytest
from monitoring import DEPLOY, dashboards, exported, queries, rules

# what Prometheus puts on every sample, or the operator's scrape configuration does
OUTSIDE = {"job", "instance", "namespace", "pod"}


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


def test_numbers_turn_red_where_alerts_fire() -> None:
    (fleet,) = (path for path in dashboards() if path.stem == "decodefleet-fleet")
    found = json.loads(fleet.read_text(encoding="utf-8"))["panels"]
    panels = {panel["title"]: panel for panel in found if panel["type"] == "stat"}
    alerts = {rule["alert"].removeprefix("Decodefleet"): rule["expr"] for rule in rules()}

    def steps(title: str) -> list[tuple[str, float | None]]:
        limits = panels[title]["fieldConfig"]["defaults"]["thresholds"]["steps"]
        return [(step["color"], step["value"]) for step in limits]

    assert steps("Workers") == [("red", None), ("green", 1)]
    assert alerts["NoWorker"].endswith("== 0")
    for title, alert in (
        ("KV in use", "KvFull"),
        ("TTFT p95", "FirstTokenSlow"),
        ("ITL p95", "TokensSlow"),
        ("Errors", "Errors"),
    ):
        limit = float(re.findall(r"> ([\d.]+)", alerts[alert])[0])
        assert steps(title) == [("green", None), ("red", limit)]
    # whatever has no limit has no colour either: Grafana's own is green
    for panel in panels.values():
        if "thresholds" not in panel["fieldConfig"]["defaults"]:
            assert panel["fieldConfig"]["defaults"]["color"]["mode"] == "fixed"


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

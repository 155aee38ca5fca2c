"""What the dashboards are made of: panels, the queries in them, and Grafana's JSON for both."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 24, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# every query is of the jobs and models chosen at the top
JOB = 'job=~"$job"'
MODEL = f'{JOB}, model_name=~"$model"'

Queries = tuple[tuple[str, str], ...]
"""(PromQL, legend) of each line."""


@dataclass(frozen=True)
class Panel:
    """kind: Grafana's panel type. width: of 24. stack: lines add up.

    good: of a number: from the first to below the second it is green, else red; without, it has no colour.
    """

    title: str
    unit: str
    queries: Queries
    kind: str = "timeseries"
    width: int = 12
    description: str = ""
    stack: bool = False
    good: tuple[float, float] | None = None


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def rate(metric: str, labels: str = MODEL, by: str = "") -> str:
    return _sum(f"rate({metric}{{{labels}}}[$__rate_interval])", by)


def total(metric: str, labels: str = MODEL, by: str = "") -> str:
    return _sum(f"{metric}{{{labels}}}", by)


def _sum(samples: str, by: str) -> str:
    """Every router answers for the whole fleet: what several of them said is one sample."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (max without (instance, pod) ({samples}))"


def percentiles(metric: str, *shares: float) -> Queries:
    grown = rate(f"{metric}_bucket", by="le")
    return tuple(
        (f"histogram_quantile({share}, {grown})", f"p{share * 100:g}")
        for share in shares or (0.5, 0.95, 0.99)
    )


def stacked(title: str, unit: str, metric: str, by: str, labels: str = JOB, width: int = WIDTH // 2) -> Panel:
    """What comes per second, a layer for each value of a label."""
    return Panel(title, unit, ((rate(metric, labels, by), f"{{{{{by}}}}}"),), width=width, stack=True)


def latency(title: str, metric: str, description: str = "", width: int = 12) -> Panel:
    return Panel(title, "s", percentiles(metric), description=description, width=width)


def number(
    title: str, unit: str, query: str, description: str = "", good: tuple[float, float] | None = None
) -> Panel:
    return Panel(title, unit, ((query, ""),), "stat", 3, description, good=good)


def heatmap(title: str, unit: str, metric: str) -> Panel:
    return Panel(title, unit, ((rate(f"{metric}_bucket", by="le"), "{{le}}"),), "heatmap")


def render(dashboard: Dashboard) -> str:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows:
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": _place(WIDTH, 1, 0, y),
            }
        )
        y += 1
        x = 0
        height = 4 if row[0].kind == "stat" else HEIGHT
        for panel in row:
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            panels.append(_panel(panel, _place(panel.width, height, x, y)))
            x += panel.width
        y += height
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return json.dumps(_frame(dashboard, panels), indent=1) + "\n"


def _frame(dashboard: Dashboard, panels: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["decodefleet"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "links": [
            {
                "type": "dashboards",
                "title": "decodefleet",
                "tags": ["decodefleet"],
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {
            "list": [
                {"name": "datasource", "label": "source", "type": "datasource", "query": "prometheus"},
                _variable("job", "label_values(decodefleet_workers, job)"),
                _variable("model", 'label_values(decodefleet_kv_blocks{job=~"$job"}, model_name)'),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    made = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {}}, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend or "__auto",
                "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            }
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }
    if panel.kind == "timeseries":
        custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
        if panel.stack:
            custom |= {"fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}}
        made["fieldConfig"]["defaults"]["custom"] = custom
        made["options"] = {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list"}}
    elif panel.kind == "stat":
        made["fieldConfig"]["defaults"] |= _colours(panel.good)
        made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    else:
        made["options"] = {"yAxis": {"unit": panel.unit}, "calculate": False}
    return made


def _colours(good: tuple[float, float] | None) -> dict[str, Any]:
    # left to itself Grafana shows whatever it is in green
    if good is None:
        return {"color": {"mode": "fixed", "fixedColor": "text"}}
    low, high = good
    steps = [{"color": "red", "value": None}] if low > 0 else []
    steps.append({"color": "green", "value": low if low > 0 else None})
    if high < math.inf:
        steps.append({"color": "red", "value": high})
    return {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": steps}}


def _place(width: int, height: int, x: int, y: int) -> dict[str, int]:
    return {"w": width, "h": height, "x": x, "y": y}

"""What is exported, and every query that deploy/ asks of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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

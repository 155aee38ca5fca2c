"""Alerts and dashboards in the real Prometheus: which alerts fire and what they say; no panel stays empty."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from monitoring import DEPLOY, RULES, exported, queries, rules
from package_file import from_debian

from decodefleet.cluster.processes import free_ports

TESTS = RULES.with_name("alerts_test.yaml")
STEP_S = 15
STEPS = 40
BEGAN = 1_700_000_000


def promtool(*arguments: str | Path) -> str:
    command = [str(from_debian("prometheus", "promtool")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_alerts_fire_when_they_should_and_say_what_they_should() -> None:
    promtool("check", "rules", RULES)
    assert "SUCCESS" in promtool("test", "rules", TESTS)


def test_each_alert_is_seen_firing_and_quiet() -> None:
    *firing, quiet = yaml.safe_load(TESTS.read_text(encoding="utf-8"))["tests"]
    names = [rule["alert"] for rule in rules()]
    assert [test["name"] for test in firing] == [f"{name} fires" for name in names]
    assert all(test["alert_rule_test"][0]["exp_alerts"] for test in firing)
    assert [(each["alertname"], each["exp_alerts"]) for each in quiet["alert_rule_test"]] == [
        (name, []) for name in names
    ]


ROUTERS = ("router-0", "router-1")


def ten_minutes() -> Iterator[str]:
    """All that is exported, by each of two routers, every number of it growing, as Prometheus takes it in
    after the event."""
    samples = [
        (name, labels, value)
        for family in exported().families.values()
        for (name, labels), value in family.samples.items()
    ]
    for (name, labels, value), pod in itertools.product(samples, ROUTERS):
        found_by = (("job", "fleet"), ("namespace", "n"), ("pod", pod), ("instance", f"{pod}:8000"))
        text = ",".join(f'{key}="{word}"' for key, word in (*labels, *found_by))
        for step in range(STEPS + 1):
            yield f"{name}{{{text}}} {(value + 1) * (step + 1):g} {BEGAN + step * STEP_S}"
    yield "# EOF\n"


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Knows ten minutes of a fleet."""
    program = from_debian("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "seen").write_text("\n".join(ten_minutes()))
    promtool("tsdb", "create-blocks-from", "openmetrics", folder / "seen", folder / "data")
    (folder / "prometheus.yaml").write_text("{}")
    (port,) = free_ports(1)
    options = {
        "config.file": folder / "prometheus.yaml",
        "storage.tsdb.path": folder / "data",
        "storage.tsdb.retention.time": "100y",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, *(f"--{name}={value}" for name, value in options.items())], stdout=log, stderr=log
        )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
        while not _ready(http):
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield http
    process.terminate()
    process.wait()


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.ConnectError:
        return False


def evaluated(http: httpx.Client, query: str) -> list[dict[str, Any]]:
    answer = http.get("/api/v1/query", params={"query": query, "time": BEGAN + STEPS * STEP_S})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def test_no_panel_stays_empty(prometheus: httpx.Client) -> None:
    empty = []
    panels = {where: query for where, query in queries().items() if not where.startswith("alert ")}
    assert len(panels) > 40
    for where, query in panels.items():
        found = evaluated(prometheus, query)
        if not found or not all(math.isfinite(float(each["value"][1])) for each in found):
            empty.append((where, found))
    assert empty == []


def values(http: httpx.Client, query: str) -> list[float]:
    return sorted(float(each["value"][1]) for each in evaluated(http, query))


def test_two_routers_that_tell_of_one_fleet_count_once(prometheus: httpx.Client) -> None:
    asked = {where: query for where, query in queries().items() if 'job=~".*"' in query}
    assert len(asked) > 40
    for where, query in asked.items():
        one = query.replace('job=~".*"', f'job=~".*", pod="{ROUTERS[0]}"')
        assert values(prometheus, query) == pytest.approx(values(prometheus, one)), where
    assert values(prometheus, "sum(decodefleet_workers)") != values(
        prometheus, f'sum(decodefleet_workers{{pod="{ROUTERS[0]}"}})'
    )


def test_alerts_count_them_once_too(prometheus: httpx.Client) -> None:
    for rule in rules():
        # without its threshold there is a number to compare
        query = re.sub(r" (>|==) [\d.]+$", "", rule["expr"])
        one = re.sub(r"(decodefleet_\w+)(\{)?", lambda found: _of_one(found[1], found[2]), query)
        assert values(prometheus, query) == pytest.approx(values(prometheus, one)), rule["alert"]


def _of_one(name: str, brace: str | None) -> str:
    chosen = f'{name}{{pod="{ROUTERS[0]}"'
    return f"{chosen}, " if brace else f"{chosen}}}"


def test_a_wrong_label_would_leave_it_empty(prometheus: httpx.Client) -> None:
    assert evaluated(prometheus, 'sum by (state) (decodefleet_workers{state="serving"})')
    assert not evaluated(prometheus, 'sum by (state) (decodefleet_workers{status="serving"})')


def test_prometheus_own_linter_has_nothing_to_say_of_our_names() -> None:
    said = subprocess.run(
        [str(from_debian("prometheus", "promtool")), "check", "metrics"],
        input=exported().render(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    # the names of vLLM's that others' dashboards read are as they are
    ours = [line for line in said.stderr.splitlines() if line.startswith("decodefleet")]
    assert ours == []


def test_the_scrape_configuration_of_the_composition_is_one(tmp_path: Path) -> None:
    text = (DEPLOY / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8")
    here = tmp_path / "prometheus.yaml"
    here.write_text(text.replace("/etc/prometheus/alerts.yaml", str(RULES)))
    promtool("check", "config", here)

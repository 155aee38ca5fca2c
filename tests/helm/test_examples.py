"""The chart and its examples, rendered by the real helm: valid to Kubernetes, KubeRay, Ray Serve and us."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_chart import CHART, EXAMPLES, ROOT, Manifest, of_kind, one, pods, render, run_helm, serve_config

# the oldest that Chart.yaml allows and the schemas know, and a newer one
KUBERNETES = ("1.28", "1.34")
CRD = "ray.io_rayservices.yaml"
OTHERS = {"RayService", "HTTPRoute", "ServiceMonitor", "PodMonitor", "PrometheusRule"}


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def crd_file() -> Path | None:
    """KubeRay's CRD: named by $KUBERAY_CRD, or in a folder `crds` of a folder beside the checkout."""
    given = os.environ.get("KUBERAY_CRD")
    return Path(given) if given else next(ROOT.parent.glob(f"*/crds/{CRD}"), None)


def ray_service_schema() -> dict[str, Any]:
    path = crd_file()
    if path is None:
        pytest.skip(f"NOT TESTED against KubeRay: set KUBERAY_CRD to its {CRD}")
    crd = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (version for version in crd["spec"]["versions"] if version["name"] == "v1")
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def unknown_fields(schema: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """What the API server would drop without a word."""
    if isinstance(value, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        known, others = schema.get("properties"), schema.get("additionalProperties")
        for key, item in value.items():
            below = (known or {}).get(key, others)
            if known is not None and below is None:
                yield f"{path}.{key}"
            elif isinstance(below, dict):
                yield from unknown_fields(below, item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from unknown_fields(schema.get("items", {}), item, f"{path}[{number}]")


def test_there_are_three() -> None:
    assert [path.stem for path in EXAMPLES] == ["cpu-only", "llama-3-70b-tp8", "one-gpu"]


def test_lint(example: Path) -> None:
    done = run_helm("lint", "--strict", str(CHART), "--values", str(example))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_manifest_and_every_pod(example: Path, version: str) -> None:
    manifests = render(file=example)
    plain = [manifest for manifest in manifests if manifest["kind"] not in OTHERS]
    assert len(plain) > 10
    for manifest in (*plain, *pods(manifests).values()):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_kuberay_takes_the_ray_service(example: Path) -> None:
    schema, service = ray_service_schema(), one(render(file=example), "RayService")
    # the schema says nothing of metadata, which Kubernetes checks itself
    jsonschema.Draft202012Validator(schema).validate(service)
    spec = {key: value for key, value in service.items() if key == "spec"}
    assert list(unknown_fields(schema, spec)) == []


def test_kuberay_would_not_take_a_misspelt_field(example: Path) -> None:
    schema, service = ray_service_schema(), one(render(file=example), "RayService")
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParam"] = {}
    assert list(unknown_fields(schema, {"spec": service["spec"]})) == [
        ".spec.rayClusterConfig.headGroupSpec.rayStartParam"
    ]


def test_names_and_numbers_that_kuberay_refuses_are_not_made(example: Path) -> None:
    manifests = render(file=example)
    service = one(manifests, "RayService")
    assert len(service["metadata"]["name"]) <= 47
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        # `resources` and numbers in rayStartParams exclude each other, as do both kinds of labels
        assert "resources" not in group
        assert "labels" not in group["rayStartParams"]
        names = {entry["name"] for entry in group["template"]["spec"]["containers"][0]["env"]}
        assert not names & {"REDIS_PASSWORD", "REDIS_USERNAME", "RAY_REDIS_ADDRESS", "RAY_CLUSTER_NAME"}


def test_no_manifest_is_rendered_twice(example: Path) -> None:
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in render(file=example)]
    assert sorted(set(names)) == sorted(names)


def test_references_lead_somewhere(example: Path) -> None:
    manifests = render(file=example)
    have = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    given = {("Secret", "huggingface-token")}
    for pod in pods(manifests).values():
        assert ("ServiceAccount", pod["spec"]["serviceAccountName"]) in have
        assert set(references(pod["spec"])) <= have | given
    (service,) = (
        found for found in of_kind(manifests, "Service") if found["spec"].get("clusterIP") != "None"
    )
    selected = [
        name
        for name, pod in pods(manifests).items()
        if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    ]
    assert selected == ["routers"]


def references(spec: Manifest) -> Iterator[tuple[str, str]]:
    for volume in spec["volumes"]:
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for container in spec["containers"]:
        for entry in container.get("env", ()):
            if "secretKeyRef" in entry.get("valueFrom", {}):
                yield "Secret", entry["valueFrom"]["secretKeyRef"]["name"]


def test_serve_config_names_no_model_twice(example: Path) -> None:
    applications = serve_config(render(file=example))["applications"]
    assert len({application["route_prefix"] for application in applications}) == len(applications)


def test_the_readme_counts_what_examples_make(example: Path) -> None:
    table = (CHART / "README.md").read_text(encoding="utf-8").split("| kind |")[1].split("\n\n")[0]
    names, _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines())
    told = {kind.split()[0]: int(counts[names.index(example.stem)]) for kind, *counts in rows}
    made = Counter(manifest["kind"] for manifest in render(file=example))
    assert told == {"all": made.total()} | {kind: made[kind] for kind in told if kind != "all"}
    assert made.total() == sum(made[kind] for kind in told)

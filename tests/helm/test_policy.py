"""What a policy scanner would ask of the chart, and what streams need of pods that end."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from helm_chart import EXAMPLES, Manifest, containers, of_kind, one, pods, render, serve_config


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda path: path.stem)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    path: Path = request.param
    return render(file=path)


def test_containers_have_no_privilege(manifests: list[Manifest]) -> None:
    for name, container in containers(manifests):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name


def test_pods_run_as_nobody_in_particular(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] > 10000, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod["spec"]), name


def test_only_the_head_holds_a_token_and_only_for_its_autoscaler(manifests: list[Manifest]) -> None:
    autoscaling = one(manifests, "RayService")["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]
    holders = {name: pod["spec"]["automountServiceAccountToken"] for name, pod in pods(manifests).items()}
    assert holders.pop("head") is autoscaling
    assert not any(holders.values())
    for account in of_kind(manifests, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_images_are_pinned(manifests: list[Manifest]) -> None:
    for name, container in containers(manifests):
        if "image" in container:
            assert container["image"].rpartition(":")[2] not in ("", "latest"), name


def test_memory_is_bounded_and_what_is_needed_reserved(manifests: list[Manifest]) -> None:
    for name, container in containers(manifests):
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
        assert "memory" in container["resources"]["limits"], name


def test_no_secret_is_in_plain_sight(manifests: list[Manifest]) -> None:
    secrets = of_kind(manifests, "Secret")
    hidden = {value for secret in secrets for value in secret["data"].values()}
    assert len(hidden) == 5
    shown = str([manifest for manifest in manifests if manifest["kind"] != "Secret"])
    for value in hidden:
        assert value not in shown
        assert base64.b64decode(value).decode().strip() not in shown


def test_every_container_has_its_probes(manifests: list[Manifest]) -> None:
    for name, container in containers(manifests):
        if name != "head/autoscaler":
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container), name


def test_a_slow_loader_is_not_killed(manifests: list[Manifest]) -> None:
    for name, container in containers(manifests):
        if name.endswith("ray-worker"):
            # of Ray on the node, which loading does not touch
            for probe in ("startupProbe", "livenessProbe"):
                assert container[probe]["httpGet"] == {"path": "/api/healthz", "port": 52365}
    (router,) = (found for name, found in containers(manifests) if name == "routers/ray-router")
    probe = router["startupProbe"]
    assert probe["httpGet"]["path"] == "/ready"
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600
    assert router["livenessProbe"]["httpGet"]["path"] == "/api/healthz"


def test_a_worker_pod_is_ready_while_its_worker_can_generate(manifests: list[Manifest]) -> None:
    options = [application["args"] for application in serve_config(manifests)["applications"]]
    for name, container in containers(manifests):
        if name.endswith("ray-worker"):
            asked = container["readinessProbe"]["httpGet"]
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert asked["path"] == "/ready"
            assert {ports[asked["port"]]} == {option["metrics_port"] for option in options}


def test_streams_have_time_to_end(manifests: list[Manifest]) -> None:
    options = [application["args"] for application in serve_config(manifests)["applications"]]
    service = one(manifests, "RayService")["spec"]
    for name, pod in pods(manifests).items():
        container = pod["spec"]["containers"][0]
        if name in ("head", "fleet-decodefleet-redis"):
            continue
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        limit_s = float(command[command.index("--limit-s") + 1])
        assert limit_s >= max(option["drain_s"] for option in options), name
        assert pod["spec"]["terminationGracePeriodSeconds"] > limit_s, name
        assert pod["spec"]["terminationGracePeriodSeconds"] <= service["rayClusterDeletionDelaySeconds"]


def budgets(manifests: list[Manifest]) -> dict[str, int]:
    """How many pods of a kind a node drain must leave; in the only form that works for Ray's pods."""
    found = {}
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        assert isinstance(budget["spec"]["minAvailable"], int)
        assert "maxUnavailable" not in budget["spec"]
        wanted = budget["spec"]["selector"]["matchLabels"].items()
        (name,) = (
            name for name, pod in pods(manifests).items() if wanted <= pod["metadata"]["labels"].items()
        )
        found[name] = budget["spec"]["minAvailable"]
    return found


def test_budgets_keep_what_serves_and_let_nodes_go() -> None:
    found = {path.stem: budgets(render(file=path)) for path in EXAMPLES}
    assert found == {
        "cpu-only": {"smollm2-135m": 1},
        "llama-3-70b-tp8": {"routers": 1},
        "one-gpu": {},
    }


FIXED, SCALED = {"replicas": 3}, {"autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 9}}
ALONE = {"replicas": 7, "autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 9}}


@pytest.mark.parametrize("group", [FIXED, SCALED], ids=["fixed", "scaled"])
@pytest.mark.parametrize(("given", "kept"), [({}, 2), ({"minAvailable": 1}, 1), ({"minAvailable": 0}, None)])
def test_a_budget_is_all_but_one_of_the_fewest_or_what_was_given(
    group: dict[str, Any], given: dict[str, int], kept: int | None
) -> None:
    sized = {"podDisruptionBudget": given} | group
    found = budgets(render({"models": [{"name": "m", "model": "org/m"} | sized], "router": sized}))
    assert (found.get("m"), found.get("routers")) == (kept, kept)


@pytest.mark.parametrize("group", [{"replicas": 1}, ALONE], ids=["fixed", "scaled"])
def test_where_one_pod_may_be_all_there_is_nothing_holds_up_a_drain(group: dict[str, Any]) -> None:
    manifests = render({"models": [{"name": "m", "model": "org/m"} | group], "router": group})
    assert of_kind(manifests, "PodDisruptionBudget") == []


def allowed(manifests: list[Manifest], labels: dict[str, str]) -> list[dict[str, Any]]:
    """The ingress rules of all policies that select a pod of these labels."""
    rules: list[dict[str, Any]] = []
    for policy in of_kind(manifests, "NetworkPolicy"):
        selector = policy["spec"]["podSelector"]
        wanted = selector.get("matchLabels", {}).items() <= labels.items()
        for expression in selector.get("matchExpressions", ()):
            wanted = wanted and labels.get(expression["key"]) in expression["values"]
        if wanted and "Ingress" in policy["spec"]["policyTypes"]:
            rules += policy["spec"]["ingress"]
    return rules


def test_strangers_reach_routers_and_nothing_else(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        rules = allowed(manifests, pod["metadata"]["labels"])
        assert rules, f"{name} is covered by no policy"
        open_to_all = [rule["ports"] for rule in rules if "from" not in rule]
        assert open_to_all == ([[{"port": "serve"}]] if name == "routers" else []), name


def test_nobody_but_serve_decides_how_many_replicas_there_are(manifests: list[Manifest]) -> None:
    """Two that scale the same thing undo each other's work."""
    kinds = {manifest["kind"] for manifest in manifests}
    assert "RayService" in kinds
    assert not kinds & {"HorizontalPodAutoscaler", "VerticalPodAutoscaler", "ScaledObject", "Deployment"}


def test_clients_can_be_narrowed_down() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"team": "search"}}}
    manifests = render({"networkPolicy": {"clientsFrom": [peer]}})
    rules = allowed(manifests, pods(manifests)["routers"]["metadata"]["labels"])
    assert all("from" in rule for rule in rules)
    assert {"ports": [{"port": "serve"}], "from": [peer]} in rules


def test_an_incremental_upgrade_opens_what_its_gateway_needs() -> None:
    upgrade = {"type": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "istio"}
    manifests = render({"ray": {"upgrade": upgrade}})
    rules = allowed(manifests, pods(manifests)["smollm2-135m"]["metadata"]["labels"])
    assert {"ports": [{"port": "serve"}]} in rules
    options = one(manifests, "RayService")["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]
    assert options["gatewayClassName"] == "istio"


def test_where_models_scale_to_zero_routers_start_without_a_worker() -> None:
    models = [{"name": "m", "model": "org/m", "autoscaling": {"enabled": True, "minReplicas": 0}}]
    (router,) = (
        found for name, found in containers(render({"models": models})) if name == "routers/ray-router"
    )
    assert router["startupProbe"]["httpGet"]["path"] == "/-/healthz"

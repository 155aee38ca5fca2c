"""What the chart tells Ray Serve: Ray's schema takes it, our options are known, pods fit what is asked."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from helm_chart import EXAMPLES, one, render, serve_config

from decodefleet.cluster.config import load_config

with warnings.catch_warnings():
    # Ray's own use of pydantic
    warnings.simplefilter("ignore")
    from ray.serve._private.application_state import override_deployment_info
    from ray.serve._private.config import DeploymentConfig, ReplicaConfig
    from ray.serve._private.deployment_info import DeploymentInfo
    from ray.serve.schema import ServeDeploySchema

ENV = {"DECODEFLEET_CLUSTER_SECRET": "x" * 48, "DECODEFLEET_REDIS_URL": "redis://:x@redis:6379/1"}


class Replica:
    """Stands for what the application binds; only its name and size matter."""


def deployed(workers: int, gpus: int) -> dict[str, DeploymentInfo]:
    """Serve's record of the application as `cluster/app.py` builds it, before the config file has its say."""

    def info(name: str, count: int, options: dict[str, Any], bundles: Any = None) -> DeploymentInfo:
        return DeploymentInfo(
            version="1",
            deployment_config=DeploymentConfig(num_replicas=count),
            replica_config=ReplicaConfig.create(
                Replica, ray_actor_options=options, placement_group_bundles=bundles
            ),
            start_time_ms=0,
            deployer_job_id="1",
            route_prefix=None,
        )

    resources = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
    return {
        "scheduler": info("scheduler", 1, {"num_cpus": 0}),
        "worker": info("worker", workers, {"num_cpus": 1, "num_gpus": gpus}, [resources]),
        "router": info("router", 1, {"num_cpus": 0}),
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_ray_and_we_take_it(example: Path) -> None:
    manifests = render(file=example)
    config = ServeDeploySchema.model_validate(serve_config(manifests))
    groups = {
        group["groupName"]: group
        for group in one(manifests, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    for application in config.applications:
        options = load_config(application.args, env=ENV).config
        assert application.import_path == "decodefleet.cluster.app:build"
        assert options.address == "auto"
        group = groups[application.name]
        gpus = int(group["rayStartParams"]["num-gpus"])
        assert gpus == (0 if options.runner.device == "cpu" else options.runner.tensor_parallel_size)
        container = group["template"]["spec"]["containers"][0]
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
        infos = override_deployment_info(deployed(options.workers, gpus), application)
        worker, router = infos["worker"].replica_config, infos["router"].replica_config
        assert worker.placement_group_bundle_label_selector == [group["labels"]]
        assert worker.placement_group_bundles == [{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}]
        assert router.ray_actor_options["label_selector"] == groups["routers"]["labels"]


def test_a_model_that_scales_has_bounds_in_serve_and_in_its_group() -> None:
    example = next(path for path in EXAMPLES if path.stem == "llama-3-70b-tp8")
    manifests = render(file=example)
    (application,) = ServeDeploySchema.model_validate(serve_config(manifests)).applications
    infos = override_deployment_info(deployed(1, 8), application)
    scaling = infos["worker"].deployment_config.autoscaling_config
    assert scaling is not None
    group = one(manifests, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert (group["minReplicas"], group["maxReplicas"]) == (1, 4)


def test_several_models_share_the_router_pods() -> None:
    models = [
        {"name": "small", "model": "smollm2-135m", "route": "/small"},
        {"name": "large", "model": "org/large", "route": "/large", "tensorParallelSize": 4},
    ]
    config = ServeDeploySchema.model_validate(serve_config(render({"models": models})))
    for application in config.applications:
        (router,) = (found for found in application.deployments if found.name == "router")
        assert router.ray_actor_options.num_cpus == 0.5
    assert [application.route_prefix for application in config.applications] == ["/small", "/large"]


def test_options_of_a_model_win_over_what_the_chart_would_say() -> None:
    models = [{"name": "m", "model": "org/m", "options": {"drain_s": 7, "max_num_seqs": 3}}]
    (application,) = serve_config(render({"models": models}))["applications"]
    assert (application["args"]["drain_s"], application["args"]["max_num_seqs"]) == (7, 3)

"""What the chart tells Ray Serve: Ray's schema takes it, our options are known, pods fit what is asked."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from helm_chart import EXAMPLES, one, render, serve_config

from decodefleet.cluster.config import ServeConfig, load_config

with warnings.catch_warnings():
    # Ray's own use of pydantic
    warnings.simplefilter("ignore")
    from ray.serve._private.application_state import override_deployment_info
    from ray.serve._private.config import DeploymentConfig, ReplicaConfig
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve._private.deployment_info import DeploymentInfo
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    from decodefleet.cluster.autoscaling.serve_policy import router_scaling, worker_scaling

ENV = {"DECODEFLEET_CLUSTER_SECRET": "x" * 48, "DECODEFLEET_REDIS_URL": "redis://:x@redis:6379/1"}


class Replica:
    """Stands for what the application binds; only its name and size matter."""


def deployed(options: ServeConfig, gpus: int) -> dict[str, DeploymentInfo]:
    """Serve's record of the application as `cluster/app.py` builds it, before the config file has its say."""

    def info(
        name: str, options: dict[str, Any], bundles: Any = None, scaling: AutoscalingConfig | None = None
    ) -> DeploymentInfo:
        numbers = {"num_replicas": 1} if scaling is None else {"autoscaling_config": scaling}
        return DeploymentInfo(
            version="1",
            deployment_config=DeploymentConfig(**numbers),
            replica_config=ReplicaConfig.create(
                Replica, ray_actor_options=options, placement_group_bundles=bundles
            ),
            start_time_ms=0,
            deployer_job_id="1",
            route_prefix=None,
        )

    resources = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
    scaling = options.scaling
    workers = scaling.max_workers and worker_scaling(scaling.min_workers, scaling.max_workers)
    routers = scaling.max_routers and router_scaling(options.routers, scaling.max_routers)
    return {
        "scheduler": info("scheduler", {"num_cpus": 0}),
        "worker": info("worker", {"num_cpus": 1, "num_gpus": gpus}, [resources], workers or None),
        "router": info("router", {"num_cpus": 0}, scaling=routers or None),
    }


def options_of(application: ServeApplicationSchema) -> ServeConfig:
    return load_config(application.args, env=ENV).config


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_ray_and_we_take_it(example: Path) -> None:
    manifests = render(file=example)
    config = ServeDeploySchema.model_validate(serve_config(manifests))
    groups = {
        group["groupName"]: group
        for group in one(manifests, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    for application in config.applications:
        options = options_of(application)
        assert application.import_path == "decodefleet.cluster.app:build"
        assert options.address == "auto"
        group = groups[application.name]
        gpus = int(group["rayStartParams"]["num-gpus"])
        assert gpus == (0 if options.runner.device == "cpu" else options.runner.tensor_parallel_size)
        container = group["template"]["spec"]["containers"][0]
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
        infos = override_deployment_info(deployed(options, gpus), application)
        worker, router = infos["worker"].replica_config, infos["router"].replica_config
        assert worker.placement_group_bundle_label_selector == [group["labels"]]
        assert worker.placement_group_bundles == [{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}]
        assert router.ray_actor_options["label_selector"] == groups["routers"]["labels"]


SCALED = {"enabled": True, "minReplicas": 2, "maxReplicas": 5}


def test_numbers_that_follow_the_load_follow_our_policies() -> None:
    models = [{"name": "m", "model": "org/m", "autoscaling": SCALED}]
    manifests = render({"models": models, "router": {"autoscaling": SCALED | {"maxReplicas": 6}}})
    (application,) = ServeDeploySchema.model_validate(serve_config(manifests)).applications
    infos = override_deployment_info(deployed(options_of(application), 1), application)
    groups = one(manifests, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    for name, group, most, policy in (
        ("router", groups[0], 6, "by_streams_and_cpu"),
        ("worker", groups[1], 5, "follow_scheduler"),
    ):
        scaling = infos[name].deployment_config.autoscaling_config
        assert scaling is not None
        assert (scaling.min_replicas, scaling.max_replicas) == (2, most)
        assert (group["minReplicas"], group["maxReplicas"]) == (2, most)
        # Serve's own counts the requests that it hands to replicas, and to workers it hands none
        assert scaling.policy.policy_function.endswith(f":{policy}")


def test_fixed_numbers_are_serves() -> None:
    values = {"models": [{"name": "m", "model": "org/m", "replicas": 3}], "router": {"replicas": 2}}
    (application,) = ServeDeploySchema.model_validate(serve_config(render(values))).applications
    infos = override_deployment_info(deployed(options_of(application), 1), application)
    numbers = {name: info.deployment_config.num_replicas for name, info in infos.items()}
    assert numbers == {"scheduler": 1, "worker": 3, "router": 2}


def test_another_number_of_replicas_replaces_none() -> None:
    def version(replicas: int) -> str:
        values = {
            "models": [{"name": "m", "model": "org/m", "replicas": replicas}],
            "router": {"replicas": replicas},
        }
        (application,) = ServeDeploySchema.model_validate(serve_config(render(values))).applications
        return get_app_code_version(application)

    assert version(1) == version(4)


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

"""The Ray Serve application: scheduler, workers and routers as deployments.

Serve owns processes, placement, health and rollout; requests never pass through it. Each class here only
wires a part that knows no Ray to Serve's life cycle. `build` is the entry for Serve config files.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.schema import LoggingConfig

from decodefleet.worker.assets.resolve import resolve_model
from decodefleet.worker.protocol import Ready
from decodefleet.worker.transport import Security

from .access.limiter import Limiter
from .api.app import build_app
from .api.settings import ApiSettings
from .autoscaling.config import ScalingOptions
from .autoscaling.controller import ScalingController
from .autoscaling.serve_policy import CPU, STREAMS, WANTED, router_scaling, worker_scaling
from .config import ConfigError, ServeConfig, load_config
from .directory.connection import connect, hang_up
from .directory.holdings import Holdings
from .directory.publisher import DirectoryPublisher
from .directory.reader import DirectoryReader
from .news import NewsSender
from .observability.process_metrics import ProcessMetrics
from .observability.tracing import open_tracing
from .replica import Locate, Supervisor, replica_config
from .router import Router
from .scheduling.config import SchedulingConfig
from .scheduling.server import SchedulerServer

# of what Serve does around a shutdown hook, and of the hook beyond the drain itself
SHUTDOWN_MARGIN_S = 15.0
# a replaced router keeps its streams: they can go on at another worker, but not at another router
ROUTER_DRAIN_S = 600.0
CALLS = 100_000
# a router that knows no model yet refuses all; where no worker comes up it has to start all the same
INTRODUCTION_S = 10.0


@dataclass(frozen=True)
class LocalRun:
    """What replicas get from a launcher on the same machine: a folder for logs, and whom to tell news."""

    log_dir: Path
    news: str


class SchedulerReplica:
    """The one active global scheduler; Serve's handle to it is how others find its endpoint."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]
        set_up_logging(config)
        redis_url, model = _redis_url(config), config.served_model_name or config.model
        self._server = SchedulerServer(
            bind=f"tcp://{data_host(config)}:0",
            advertise_host=config.advertise_host,
            security=Security.from_secret(config.secret()),
            config=scheduling_config(config),
            directory=DirectoryReader(redis_url, model) if redis_url is not None else None,
        )
        await self._server.start()
        # what is there by now stays: looking for garbage in it would hold up placements
        gc.collect()
        gc.freeze()
        scaling = config.scaling.of_workers(config.batch.itl_target_ms)
        self._scaling: ScalingController | None = None
        if scaling is not None:
            self._scaling = ScalingController(
                self._server.core,
                scaling,
                model,
                step_target_s=config.batch.itl_target_ms / 1000,
                wake=_waker(serve.get_replica_context().app_name),
            )
            self._scaling.start()
        loop = asyncio.get_running_loop()
        self._port = _own_port(
            config, lambda: asyncio.run_coroutine_threadsafe(self._server.metrics(), loop).result(10)
        )

    async def locate(self) -> tuple[str, int]:
        return self._server.endpoint, self._server.epoch

    async def wanted_workers(self) -> int | None:
        """None where their number is fixed."""
        return None if self._scaling is None else self._scaling.wanted

    async def metrics(self) -> str:
        return await self._server.metrics()

    async def directory(self, model: str | None, prompt: bytes | None) -> Holdings:
        return self._server.directory(model, prompt)

    async def overview(self, since: float) -> dict[str, Any]:
        return self._server.overview(since)

    async def placements(self, request_id: str | None = None) -> list[dict[str, Any]]:
        return self._server.placements(request_id)

    async def check_health(self) -> None:
        self._server.check_health()

    async def __del__(self) -> None:
        _close(self._port)
        if self._scaling is not None:
            await self._scaling.stop()
        await self._server.stop()


class WorkerReplica:
    """One model replica. Serve counts it as started when it can generate."""

    async def __init__(self, config: ServeConfig, scheduler: Any, local: LocalRun | None) -> None:  # type: ignore[misc]
        set_up_logging(config)
        worker_id = f"worker-{serve.get_replica_context().replica_id.unique_id}"
        redis_url = _redis_url(config)

        def make_publisher(ready: Ready) -> DirectoryPublisher:
            assert redis_url is not None
            return DirectoryPublisher.of_worker(redis_url, ready)

        self._supervisor = Supervisor(
            config,
            worker_id,
            _locate(scheduler),
            host=data_host(config),
            make_publisher=make_publisher if redis_url is not None else None,
            log_file=local.log_dir / f"{worker_id}.log" if local is not None else None,
            news=NewsSender(local.news, worker_id) if local is not None else None,
        )
        self._port = _own_port(config, self._supervisor.metrics, lambda: self._supervisor.ready is not None)
        self._scheduler = scheduler
        await self._supervisor.start()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve lets a policy hear the replicas of its own deployment only."""
        wanted = await self._scheduler.wanted_workers.remote()
        return {} if wanted is None else {WANTED: float(wanted)}

    async def wake(self) -> None:
        """Done when there is a worker: a call that waits for one is what makes Serve start it."""

    async def check_health(self) -> None:
        self._supervisor.check_health()

    async def __del__(self) -> None:
        _close(self._port)
        await self._supervisor.stop()


@serve.ingress()
class RouterReplica:
    """One router behind Serve's HAProxy, which talks to this replica's own HTTP server."""

    async def __init__(self, config: ServeConfig, scheduler: Any, workers: Any) -> None:  # type: ignore[misc]
        # `workers` is here so that they belong to the application; the way to them is the scheduler's to say
        del workers
        set_up_logging(config)
        if config.address is not None:
            # the tokenizer has to lie where it does on the workers' machines
            await asyncio.to_thread(
                resolve_model,
                config.model,
                cache_dir=config.cache_dir,
                revision=config.revision,
                weights=False,
            )
        self._config = config
        self._fleet = FleetOfServe(scheduler)
        self._router = Router(_locate(scheduler), Security.from_secret(config.secret()))
        self._tracing = open_tracing(config.otlp_traces_endpoint, self._router.router_id)
        self._port = _own_port(config, self._router.metrics.text)
        redis_url = _redis_url(config)
        self._redis = connect(redis_url) if redis_url is not None else None
        self._limiter = Limiter(self._redis, routers=lambda: self._router.routers)
        self._router.start()
        # requests come as soon as this returns
        await self._router.introduce(INTRODUCTION_S)
        self._process = psutil.Process()

    def __serve_build_asgi_app__(self) -> FastAPI:
        config = self._config
        settings = ApiSettings(
            api_keys=config.api_keys(),
            api_key_file=config.api_key_file,
            allowed_origins=config.allowed_origins,
            max_body_bytes=config.max_body_bytes,
            # Serve's own middleware appends one, whatever stands there
            echo_request_id=False,
            access_log=config.access_log,
            log_fields=config.log_format == "json",
        )
        app: FastAPI = build_app(
            self._router, settings, fleet=self._fleet, tracing=self._tracing, limiter=self._limiter
        )
        return app

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {STREAMS: float(self._router.streams), CPU: self._process.cpu_percent() / 100}

    async def check_health(self) -> None:
        self._router.check_health()

    async def __del__(self) -> None:
        _close(self._port)
        await self._router.close()
        if self._redis is not None:
            await hang_up(self._redis)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


class FleetOfServe:
    """A `FleetSource` that asks the scheduler's replica, wherever Serve has put it."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    async def metrics(self) -> str:
        text: str = await self._scheduler.metrics.remote()
        return text

    async def placements(self, request_id: str | None) -> list[dict[str, Any]]:
        placements: list[dict[str, Any]] = await self._scheduler.placements.remote(request_id)
        return placements

    async def directory(self, model: str | None, prompt: bytes | None) -> Holdings:
        holdings: Holdings = await self._scheduler.directory.remote(model, prompt)
        return holdings

    async def overview(self, since: float) -> dict[str, Any]:
        overview: dict[str, Any] = await self._scheduler.overview.remote(since)
        return overview


def build_application(config: ServeConfig, local: LocalRun | None = None) -> serve.Application:
    """The application for a connected Ray cluster. Raises ConfigError where it has too few GPUs."""
    # workers and scheduler must agree on the name, wherever each of them finds the model
    config = config.model_copy(update={"served_model_name": config.served_model_name or config.model})
    common = {
        "max_ongoing_requests": CALLS,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 5,
        # routers log requests themselves; Serve would format a line for each
        "logging_config": LoggingConfig(enable_access_log=False, encoding=config.log_format.upper()),
    }
    drained_s = config.drain_s + SHUTDOWN_MARGIN_S
    resources = _worker_resources(config)
    told = replica_config(config)
    # bounds of scaling are the scheduler's business: another one must not replace workers
    plain = told.model_copy(update={"scaling": ScalingOptions()})
    scheduler = serve.deployment(
        SchedulerReplica, name="scheduler", ray_actor_options={"num_cpus": 0}, **common
    ).bind(told)
    workers = serve.deployment(
        WorkerReplica,
        name="worker",
        ray_actor_options={"num_cpus": resources["CPU"], "num_gpus": resources["GPU"]},
        placement_group_bundles=[{name: count for name, count in resources.items() if count}],
        graceful_shutdown_timeout_s=drained_s,
        **_number_of_workers(config),
        **common,
    ).bind(plain, scheduler, local)
    return serve.deployment(
        RouterReplica,
        name="router",
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=max(drained_s, ROUTER_DRAIN_S),
        **_number_of_routers(config),
        **common,
    ).bind(plain, scheduler, workers)


def build(args: dict[str, Any]) -> serve.Application:
    """For `import_path: decodefleet.cluster.app:build` in a Serve config file.

    args: options by their flat names; the environment is read as `decodefleet serve` reads it. On several
    machines set `address: auto` and `redis_url`.
    """
    return build_application(load_config(args, env=os.environ).config)


def scheduling_config(config: ServeConfig) -> SchedulingConfig:
    chosen: dict[str, Any] = {}
    if config.scaling.max_workers is not None and config.scaling.min_workers == 0:
        chosen = {"sleeps": True, "no_worker_grace_s": config.scaling.cold_start_s}
    return SchedulingConfig(
        policy=config.policy, max_queue=config.max_queue, max_queue_wait_s=config.max_queue_wait_s, **chosen
    )


def _number_of_workers(config: ServeConfig) -> dict[str, Any]:
    scaling = config.scaling
    if scaling.max_workers is None:
        return {"num_replicas": config.workers}
    return {"autoscaling_config": worker_scaling(scaling.min_workers, scaling.max_workers)}


def _number_of_routers(config: ServeConfig) -> dict[str, Any]:
    most = config.scaling.max_routers
    if most is None:
        return {"num_replicas": config.routers}
    return {"autoscaling_config": router_scaling(config.routers, most)}


def _waker(app_name: str) -> Callable[[], Awaitable[None]]:
    async def wake() -> None:
        await serve.get_deployment_handle("worker", app_name).wake.remote()

    return wake


def data_host(config: ServeConfig) -> str:
    """Address of this machine by which the parts of the cluster meet."""
    if config.data_host is not None:
        return config.data_host
    return ray.util.get_node_ip_address() if config.address is not None else "127.0.0.1"


def _own_port(
    config: ServeConfig, read: Callable[[], str], ready: Callable[[], bool] = lambda: True
) -> ProcessMetrics | None:
    if config.metrics_port is None:
        return None
    return ProcessMetrics(data_host(config), config.metrics_port, read, ready)


def _close(port: ProcessMetrics | None) -> None:
    if port is not None:
        port.close()


def set_up_logging(config: ServeConfig) -> None:
    """Our own log lines join Serve's in the replica's log file."""
    log = logging.getLogger("decodefleet")
    log.setLevel(config.log_level.upper())
    log.handlers = list(logging.getLogger("ray.serve").handlers)


def _worker_resources(config: ServeConfig) -> dict[str, int]:
    """What one worker claims of the cluster: one bundle, so all of it on one machine. Its ranks are processes
    of its own, each with a GPU where they compute on such."""
    gpus, ranks = int(ray.cluster_resources().get("GPU", 0)), config.runner.tensor_parallel_size
    device = "cpu" if config.fake else config.runner.device
    if device == "cpu" or (device == "auto" and gpus == 0):
        return {"CPU": 1, "GPU": 0}
    # a cluster that somebody else runs may bring machines when they are asked for
    if config.address is None and gpus < config.first_workers * ranks:
        each = "a GPU" if ranks == 1 else f"{ranks} GPUs"
        raise ConfigError(f"workers: {config.first_workers} workers need {each} each, the cluster has {gpus}")
    return {"CPU": 1, "GPU": ranks}


def _redis_url(config: ServeConfig) -> str | None:
    return config.redis_url.get_secret_value() if config.redis_url is not None else None


def _locate(scheduler: Any) -> Locate:
    async def locate() -> tuple[str, int]:
        endpoint, epoch = await scheduler.locate.remote()
        return endpoint, epoch

    return locate

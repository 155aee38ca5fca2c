"""Ray Serve's side of autoscaling: replicas report what is wanted, and the policy passes it on to Serve.

The scheduler decides how many workers there are (`Autoscaler`). Serve hands a policy nothing but what
replicas of its own deployment record, so each worker asks the scheduler and records the answer. Serve's own
delays and factors are switched off: hysteresis is the autoscaler's. Runs in Serve's controller.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

WANTED = "wanted_workers"
STREAMS = "streams"
CPU = "cpu"
# per router; a core relays some thousands of tokens per second
STREAMS_PER_ROUTER, CPU_PER_ROUTER = 200.0, 0.7
ROUTER_HOLD_S = 120.0
LOOK_BACK_S = 15.0


def follow_scheduler(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """For workers: what the scheduler said last; no change where nobody has said anything."""
    said = (context.raw_metrics or {}).get(WANTED) or {}
    latest = max((point for series in said.values() for point in series), key=_at, default=None)
    if latest is None:
        return context.target_num_replicas, {}
    return round(latest.value), {}


def by_streams_and_cpu(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """For routers: open streams and CPU against what a router bears."""
    metrics = context.aggregated_metrics or {}
    streams, cpu = (sum((metrics.get(name) or {}).values()) for name in (STREAMS, CPU))
    return max(1, ceil(streams / STREAMS_PER_ROUTER), ceil(cpu / CPU_PER_ROUTER)), {}


def worker_scaling(least: int, most: int) -> AutoscalingConfig:
    """Starts with one worker at least: it tells which model is served."""
    return AutoscalingConfig(
        min_replicas=least,
        initial_replicas=max(1, least),
        max_replicas=most,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        downscale_to_zero_delay_s=0.0,
        look_back_period_s=LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_function=f"{__name__}:follow_scheduler"),
    )


def router_scaling(least: int, most: int) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        upscale_delay_s=0.0,
        downscale_delay_s=ROUTER_HOLD_S,
        look_back_period_s=LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_function=f"{__name__}:by_streams_and_cpu"),
    )


def _at(point: Any) -> float:
    return float(point.timestamp)

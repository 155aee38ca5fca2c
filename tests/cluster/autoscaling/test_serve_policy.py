"""What Serve is told, from contexts as its controller makes them."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    # Ray's own use of pydantic
    warnings.simplefilter("ignore")
    from ray.serve.config import AutoscalingContext

    from decodefleet.cluster.autoscaling.serve_policy import (
        CPU,
        STREAMS,
        WANTED,
        by_streams_and_cpu,
        follow_scheduler,
        router_scaling,
        worker_scaling,
    )


def context(target: int = 2, raw=None, aggregated=None) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="worker",
        app_name="decodefleet",
        current_num_replicas=target,
        target_num_replicas=target,
        running_replicas=[],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics=aggregated,
        raw_metrics=raw,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=None,
    )


def points(*pairs: tuple[float, float]) -> list[SimpleNamespace]:
    return [SimpleNamespace(timestamp=timestamp, value=value) for timestamp, value in pairs]


def test_the_latest_word_counts():
    raw = {WANTED: {"a": points((1.0, 3.0), (4.0, 5.0)), "b": points((2.0, 4.0))}}
    assert follow_scheduler(context(raw=raw)) == (5, {})


@pytest.mark.parametrize("raw", [None, {}, {WANTED: {}}, {WANTED: {"a": []}}])
def test_silence_changes_nothing(raw):
    assert follow_scheduler(context(target=7, raw=raw)) == (7, {})


@pytest.mark.parametrize(
    ("streams", "cpu", "routers"),
    [((10, 20), (0.1, 0.1), 1), ((150, 250), (0.1, 0.1), 2), ((1, 1), (0.95, 0.7), 3)],
)
def test_routers_follow_streams_or_cpu_whichever_takes_more(streams, cpu, routers):
    aggregated = {STREAMS: dict(enumerate(streams)), CPU: dict(enumerate(cpu))}
    assert by_streams_and_cpu(context(aggregated=aggregated)) == (routers, {})


def test_serve_finds_the_policies_by_name():
    for config in (worker_scaling(0, 4), router_scaling(1, 3)):
        assert callable(config.policy.get_policy())
    assert (worker_scaling(0, 4).min_replicas, worker_scaling(0, 4).initial_replicas) == (0, 1)

"""Sums over routers and workers, living and dead, read back by Prometheus' own parser."""

import math
import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from decodefleet.cluster.observability.exposition import Exposition, parse
from decodefleet.cluster.scheduling import fleet_metrics
from decodefleet.cluster.scheduling.fleet_metrics import FleetMetrics, OwnCounters
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import Register, TierStats, WorkerStats

OWN = OwnCounters(malformed=2, unreachable={"full": 1}, directory_up=True, directory_lag_s=0.25)
# everything that has to be escaped
CODE = '2"0\\0\n'
VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
}


def make_report(requests: int, in_flight: int, latencies=()) -> str:
    """What a router says of itself."""
    registry = CollectorRegistry()
    Counter("requests", 'Requests, "quoted"\nand broken.', ["code"], registry=registry).labels(
        '2"0\\0\n'
    ).inc(requests)
    Gauge("in_flight", "Now.", registry=registry).set(in_flight)
    histogram = Histogram("latency_seconds", "Time.", buckets=(0.1, 1), registry=registry)
    for latency in latencies:
        histogram.observe(latency)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, "a sample stands twice"
            found[key] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, tuple(sorted(labels.items()))]


def register(scheduler, make, metrics: FleetMetrics, worker_id: str, incarnation: str, **stats) -> None:
    message: Register = make.register(worker_id, incarnation, **stats)
    scheduler.register(message, 0.0)
    metrics.worker_report(WorkerKey(worker_id, incarnation), "m", message.stats)


def test_routers_are_summed_and_only_the_living_have_gauges(make):
    scheduler, metrics = make.scheduler(0), FleetMetrics()
    scheduler.hello("one", 0.0)
    metrics.router_report("one", make_report(3, 5, [0.05, 0.5]))
    metrics.router_report("dead", make_report(4, 7, [0.5, 5.0]))
    text = metrics.sample(scheduler, OWN).render()
    assert value(text, "requests_total", code='2"0\\0\n') == 7
    assert value(text, "in_flight") == 5
    assert [value(text, "latency_seconds_bucket", le=le) for le in ("0.1", "1.0", "+Inf")] == [1, 3, 4]
    assert value(text, "latency_seconds_sum") == pytest.approx(6.05)
    assert "_created" not in text
    # a newer report replaces the one before
    metrics.router_report("one", make_report(4, 0, [0.05, 0.5]))
    assert value(metrics.sample(scheduler, OWN).render(), "requests_total", code='2"0\\0\n') == 8


def test_counters_never_go_back(make, monkeypatch):
    monkeypatch.setattr(fleet_metrics, "_DEAD_KEPT", 2)
    scheduler, metrics = make.scheduler(0), FleetMetrics()
    tokens = requests = 0.0
    for life in range(8):
        register(scheduler, make, metrics, "w0", f"life {life}", prompt_tokens=10, finished={"stop": 1})
        metrics.router_report(f"router {life}", make_report(2, 1))
        scheduler.hello(f"router {life}", 0.0)
        text = metrics.sample(scheduler, OWN).render()
        assert value(text, "decodefleet_prompt_tokens_total", model_name="m") == tokens + 10
        assert value(text, "requests_total", code='2"0\\0\n') == requests + 2
        tokens, requests = tokens + 10, requests + 2
        scheduler.router_gone(f"router {life}", 0.0)
    # with bounded memory of the dead
    metrics.sample(scheduler, OWN)
    assert len(metrics._workers) <= 3
    assert len(metrics._routers) <= 2


def test_workers_and_scheduler(make):
    scheduler, metrics = make.scheduler(0), FleetMetrics()
    register(scheduler, make, metrics, "w0", "one", running=3, waiting=1, max_running=1, free_blocks=400)
    register(scheduler, make, metrics, "w1", "one", draining=True, total_blocks=1000, free_blocks=600)
    scheduler.place(make.place("a"), "router", 0.0)
    scheduler.place(make.place("b", model="nobody's"), "router", 0.0)
    text = metrics.sample(scheduler, OWN).render()
    model = {"model_name": "m"}
    assert value(text, "vllm:num_requests_running", **model) == 3
    # one in a worker, one in the scheduler's queue
    assert value(text, "vllm:num_requests_waiting", **model) == 2
    assert value(text, "vllm:kv_cache_usage_perc", **model) == pytest.approx(0.5)
    assert value(text, "decodefleet_workers", state="serving") == 1
    assert value(text, "decodefleet_workers", state="draining") == 1
    assert value(text, "decodefleet_scheduler_queue_length") == 1
    assert value(text, "decodefleet_scheduler_reservations") == 0
    assert value(text, "decodefleet_scheduler_refusals_total", reason="unknown_model") == 1
    assert value(text, "decodefleet_scheduler_malformed_frames_total") == 2
    assert value(text, "decodefleet_scheduler_unreachable_total", reason="full") == 1
    assert value(text, "decodefleet_scheduler_directory_lag_seconds") == 0.25


def test_names_that_others_rely_on(make):
    scheduler, metrics = make.scheduler(0), FleetMetrics()
    register(scheduler, make, metrics, "w0", "one", finished={"length": 1})
    names = {name for name, _ in samples(metrics.sample(scheduler, OWN).render())}
    assert names >= VLLM_NAMES
    assert all(name.startswith(("decodefleet_", "vllm:")) for name in names)


@pytest.mark.parametrize("text", ["x{", "x 1 2 3 4", "# TYPE x counter\nx{a=b} 1", "\x00"])
def test_unreadable_report_is_left_out(make, text):
    scheduler, metrics = make.scheduler(0), FleetMetrics()
    scheduler.hello("bad", 0.0)
    metrics.router_report("bad", text)
    metrics.router_report("good", make_report(1, 1))
    assert value(metrics.sample(scheduler, OWN).render(), "requests_total", code='2"0\\0\n') == 1


def test_worker_without_blocks_has_no_usage(make):
    scheduler, metrics = make.scheduler(0), FleetMetrics()
    scheduler.register(make.register(total_blocks=0, free_blocks=0), 0.0)
    metrics.worker_report(WorkerKey("w0", "one"), "m", WorkerStats())
    assert value(metrics.sample(scheduler, OWN).render(), "vllm:kv_cache_usage_perc", model_name="m") == 0


def test_numbers_survive_the_round_trip():
    exposition = Exposition()
    numbers = {"a": 0.1, "b": 1e300, "c": math.inf, "d": -math.inf, "e": 12345678901234567890.0, "f": -2.0}
    for name, number in numbers.items():
        exposition.record(name, "gauge", "N.", number)
    again = parse(exposition.render())
    assert {name: family.samples[name, ()] for name, family in again.families.items()} == numbers


def tiers(restored: int) -> dict[str, TierStats]:
    return {
        "cpu": TierStats(total_blocks=100, used_blocks=60, stored_bytes=500, evicted={"kept": 7, "lost": 2}),
        "nvme": TierStats(
            total_blocks=900,
            used_blocks=9,
            restored_blocks=restored,
            restored_bytes=10 * restored,
            corrupt_blocks=1,
            bytes_per_s=2e9,
        ),
    }


def test_tiers_are_summed_by_name(make):
    scheduler, metrics = make.scheduler(0), FleetMetrics()
    shared = {"evicted_blocks": 20, "lost_blocks": 5, "swapped": 2, "tier_stall_s": 0.25, "restoring": 1}
    register(scheduler, make, metrics, "w0", "one", free_blocks=400, tiers=tiers(3), **shared)
    register(scheduler, make, metrics, "w1", "one", free_blocks=1000, tiers=tiers(4), **shared)
    # one without tiers: all that it evicts is lost
    register(scheduler, make, metrics, "w2", "one", free_blocks=1000, evicted_blocks=100)
    text = metrics.sample(scheduler, OWN).render()

    def tier(name: str, tier: str, **labels: str) -> float:
        return value(text, f"decodefleet_kv_tier_{name}", model_name="m", tier=tier, **labels)

    assert [tier("blocks", name) for name in ("gpu", "cpu", "nvme")] == [3000, 200, 1800]
    assert [tier("blocks_held", name) for name in ("gpu", "cpu", "nvme")] == [600, 120, 18]
    assert tier("restored_blocks_total", "nvme") == 7
    assert tier("restored_bytes_total", "nvme") == 70
    assert tier("stored_bytes_total", "cpu") == 1000
    assert tier("corrupt_blocks_total", "nvme") == 2
    assert tier("restore_bytes_per_second", "nvme") == 4e9
    assert [tier("evicted_blocks_total", "gpu", fate=fate) for fate in ("kept", "lost")] == [30, 110]
    assert [tier("evicted_blocks_total", "cpu", fate=fate) for fate in ("kept", "lost")] == [14, 4]
    assert tier("evicted_blocks_total", "nvme", fate="lost") == 0
    assert value(text, "decodefleet_evicted_blocks_total", model_name="m") == 140
    assert value(text, "decodefleet_swapped_sequences_total", model_name="m") == 4
    assert value(text, "decodefleet_kv_stall_seconds_total", model_name="m") == 0.5
    assert value(text, "decodefleet_sequences_restoring", model_name="m") == 2


def test_tiers_of_the_dead_count_on_and_hold_nothing(make):
    scheduler, metrics = make.scheduler(0), FleetMetrics()
    register(scheduler, make, metrics, "w0", "one", tiers=tiers(3))
    register(scheduler, make, metrics, "w0", "two", tiers=tiers(1))
    text = metrics.sample(scheduler, OWN).render()
    labels = {"model_name": "m", "tier": "nvme"}
    assert value(text, "decodefleet_kv_tier_restored_blocks_total", **labels) == 4
    assert value(text, "decodefleet_kv_tier_blocks_held", **labels) == 9


def test_names_follow_the_conventions(make):
    """Counters end in _total, gauges do not; base units; every family has a help text that is a sentence."""
    scheduler, metrics = make.scheduler(0), FleetMetrics()
    register(scheduler, make, metrics, "w0", "one", finished={"length": 1}, tiers=tiers(1))
    families = parse(metrics.sample(scheduler, OWN).render()).families
    assert any(name.startswith("decodefleet_kv_tier_") for name in families)
    for name, family in families.items():
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert re.fullmatch(r"(decodefleet_|vllm:)[a-z][a-z0-9_]*[a-z0-9]", name), name
        assert not re.search(r"(_ms|_milliseconds|_kib|_mib|_gib|_percent|_count)(_total)?$", name), name
        assert family.documentation[0].isupper() or family.documentation[0].isdigit(), name
        assert family.documentation.endswith("."), name

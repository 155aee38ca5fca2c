"""What a generation's events come to, on a clock that the test moves."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decodefleet.cluster.observability.router_metrics import MEASURES, RESUME, RouterMetrics
from decodefleet.cluster.observability.timeline import Timeline
from decodefleet.worker.protocol import Placement, TokenDelta


class Scene:
    def __init__(self, **options) -> None:
        self.now = 100.0
        self.metrics = RouterMetrics()
        self.timeline = Timeline("r", "m", 40, self.metrics, clock=lambda: self.now, **options)

    def place(self, worker_id: str, after: float) -> None:
        self.timeline.placing()
        self.now += after
        self.timeline.placed(
            Placement(
                request_id="r",
                worker_id=worker_id,
                incarnation="i",
                endpoint="tcp://x",
                epoch=1,
                predicted_s=0.1,
            )
        )

    def receive(self, after: float, count: int = 1, index: int = 0, **fields) -> None:
        self.now += after
        self.timeline.received(TokenDelta(request_id="r", index=index, tokens=(7,) * count, **fields))

    def samples(self) -> dict[str, float]:
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(self.metrics.text())
            for sample in family.samples
            if "le" not in sample.labels
        }


def test_a_request_from_start_to_end():
    scene = Scene(tenant="acme")
    scene.place("w0", 0.25)
    scene.receive(0.5, cached_tokens=32, queued_s=0.125)
    scene.receive(0.25)
    scene.receive(0.5, count=2)
    scene.timeline.finished("stop")
    scene.timeline.closed()
    timeline = scene.timeline
    assert (timeline.ttft_s, timeline.queue_s, timeline.decode_s) == (0.75, 0.375, 0.75)
    assert (timeline.generated_tokens, timeline.cached_tokens, timeline.longest_gap_s) == (4, 32, 0.5)
    assert timeline.tpot_s == 0.25
    assert timeline.worker_id == "w0"
    samples = scene.samples()
    for prefix in ("decodefleet_router_", "vllm:"):
        assert samples[f"{prefix}time_to_first_token_seconds_sum"] == 0.75
        assert samples[f"{prefix}inter_token_latency_seconds_count"] == 2
        assert samples[f"{prefix}e2e_request_latency_seconds_sum"] == 1.5
    assert samples["vllm:request_queue_time_seconds_sum"] == 0.375
    assert samples["vllm:request_prefill_time_seconds_sum"] == 0.375
    assert samples["vllm:request_inference_time_seconds_sum"] == 1.125
    assert samples["vllm:request_generation_tokens_sum"] == 4
    assert samples["decodefleet_router_in_flight"] == 0
    assert samples["decodefleet_router_cached_tokens_total"] == 32


def test_a_move_to_another_worker_is_an_attempt_of_its_own():
    scene = Scene()
    scene.place("w0", 0.25)
    scene.receive(0.25, cached_tokens=0, queued_s=0.0)
    scene.now += 0.5
    scene.timeline.moved(ConnectionError("w0 is gone"))
    scene.place("w1", 0.25)
    scene.receive(0.25, cached_tokens=16, queued_s=0.0)
    scene.timeline.closed()
    first, second = scene.timeline.attempts
    assert (first.error, first.tokens, second.error, second.tokens) == ("w0 is gone", 1, None, 1)
    assert first.ended == 101.0
    # the client's first token was the first worker's; the gap is the client's too
    assert scene.timeline.ttft_s == 0.5
    assert scene.timeline.longest_gap_s == 1.0
    samples = scene.samples()
    assert samples["decodefleet_router_retries_total"] == 1
    assert samples["decodefleet_router_migrations_total"] == 1
    assert samples["decodefleet_router_resume_seconds_sum"] == 0.5
    assert samples["decodefleet_router_prompt_tokens_total"] == 40
    assert scene.timeline.worker_id == "w1"


def test_gaps_are_a_sequence_s_own():
    scene = Scene(n=2)
    scene.place("w0", 0.0)
    scene.receive(0.5, cached_tokens=0)
    scene.receive(0.0, index=1)
    scene.receive(0.25, index=1)
    scene.receive(0.25)
    assert scene.timeline.longest_gap_s == 0.5
    assert scene.samples()["vllm:inter_token_latency_seconds_count"] == 2
    # two sequences, one token later each
    assert scene.timeline.tpot_s == 0.5


def test_what_never_began_has_no_latencies():
    scene = Scene()
    scene.timeline.placing()
    scene.now += 1.0
    scene.timeline.failed(TimeoutError("late"), "deadline")
    scene.timeline.closed()
    samples = scene.samples()
    assert "vllm:e2e_request_latency_seconds_count" not in samples
    assert samples["decodefleet_router_failures_total"] == 1
    assert scene.metrics.counts().failures == 1
    assert scene.timeline.attempts[0].error == "late"


@pytest.mark.parametrize("tenants", [10, 500])
def test_tenants_beyond_a_number_share_a_label(tenants):
    metrics = RouterMetrics()
    for number in range(tenants):
        Timeline("r", "m", 1, metrics, tenant=f"tenant {number}", authenticated=True).closed()
    Timeline("r", "m", 1, metrics, tenant="so they say").closed()
    labels = {
        sample.labels["tenant"]: sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
        if sample.name == "decodefleet_router_tenant_requests_total"
    }
    assert len(labels) <= 66
    assert sum(labels.values()) == tenants + 1
    assert labels["none"] == 1
    assert ("other" in labels) == (tenants > 64)


def test_every_measure_that_vllm_knows_has_its_name_there():
    names = [measure.alias for measure in MEASURES if measure is not RESUME]
    assert len({*names}) == len(names)
    assert all(name is not None and name.startswith("vllm:") for name in names)
    assert all(measure.name.startswith("decodefleet_router_") for measure in MEASURES)

"""A process' own port: what it answers, and that processes of one machine don't share one."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from decodefleet.cluster.observability.process_metrics import ProcessMetrics
from decodefleet.cluster.observability.worker_metrics import worker_text
from decodefleet.worker.protocol import ModelCard, WorkerStats

CARD = ModelCard(
    name="m",
    folder="",
    max_model_len=100,
    vocab_size=50,
    block_size=16,
    hash_root=b"",
    kv_bytes_per_token=1,
)


def test_a_worker_s_metrics_and_its_process_s():
    stats = WorkerStats(running=2, waiting=3, total_blocks=10, free_blocks=4, cached_blocks=1)
    served = ProcessMetrics("127.0.0.1", 0, lambda: worker_text(CARD, stats))
    try:
        answer = httpx.get(f"http://127.0.0.1:{served.port}/metrics")
        assert httpx.get(f"http://127.0.0.1:{served.port}/").status_code == 404
    finally:
        served.close()
    found = {
        sample.name: sample
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert found["vllm:num_requests_running"].value == 2
    assert found["vllm:num_requests_waiting"].value == 3
    assert found["vllm:kv_cache_usage_perc"].value == 0.5
    assert found["vllm:cache_config_info"].labels["block_size"] == "16"
    assert found["process_resident_memory_bytes"].value > 0


def test_each_process_takes_the_next_free_port():
    first = ProcessMetrics("127.0.0.1", 0, str)
    second = ProcessMetrics("127.0.0.1", first.port, str)
    try:
        assert second.port > first.port
    finally:
        first.close()
        second.close()


def test_a_process_says_whether_it_is_ready():
    states = iter((False, True))
    served = ProcessMetrics("127.0.0.1", 0, str, lambda: next(states))
    always = ProcessMetrics("127.0.0.1", 0, str)
    try:
        answers = [httpx.get(f"http://127.0.0.1:{served.port}/ready").status_code for _ in range(2)]
        assert answers == [503, 200]
        assert httpx.get(f"http://127.0.0.1:{always.port}/ready").status_code == 200
    finally:
        served.close()
        always.close()


def test_a_failure_to_read_is_an_answer(caplog):
    def read() -> str:
        raise RuntimeError("no")

    served = ProcessMetrics("127.0.0.1", 0, read)
    try:
        assert httpx.get(f"http://127.0.0.1:{served.port}/metrics").status_code == 503
    finally:
        served.close()
    assert "metrics cannot be read" in caplog.text


def test_an_address_that_is_not_ours_is_an_error():
    with pytest.raises(OSError):
        ProcessMetrics("203.0.113.1", 0, str)

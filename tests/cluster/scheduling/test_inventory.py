"""What the scheduler says of who holds what."""

from decodefleet.cluster.scheduling.inventory import inventory
from decodefleet.cluster.scheduling.scheduler import GlobalScheduler
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import ModelCard, Register, WorkerStats

CHAIN = [number.to_bytes(16, "big") for number in range(1, 9)]


def make_scheduler(*workers: str) -> GlobalScheduler:
    scheduler = GlobalScheduler(1)
    for name in workers:
        card = ModelCard(
            name="m" if name != "other" else "another",
            folder="",
            max_model_len=100,
            vocab_size=10,
            block_size=16,
            hash_root=b"",
            kv_bytes_per_token=1,
        )
        stats = WorkerStats(total_blocks=100)
        scheduler.register(
            Register(worker_id=name, incarnation="one", endpoint="tcp://x:1", card=card, stats=stats), 0.0
        )
    return scheduler


def test_blocks_and_prefixes_of_each_worker():
    scheduler = make_scheduler("a", "b", "other")
    index = scheduler.index
    index.stored(WorkerKey("a", "one"), CHAIN[:3])
    index.stored(WorkerKey("a", "one"), CHAIN[:5], "cpu")
    index.stored(WorkerKey("b", "one"), CHAIN[2:], "nvme")
    index.stored(WorkerKey("gone", "one"), CHAIN)
    found = inventory(scheduler, "m", b"".join(CHAIN), now=0.1)
    assert found.prompt_blocks == 8
    first, second = found.holders
    assert first.worker_id == "a"
    assert first.state == "serving"
    assert first.blocks == {"gpu": 3, "cpu": 5, "nvme": 0}
    assert first.prefix == {"gpu": 3, "cpu": 5, "nvme": 5}
    assert second.blocks == {"gpu": 0, "cpu": 0, "nvme": 6}
    assert second.prefix == {"gpu": 0, "cpu": 0, "nvme": 0}


def test_without_a_prompt_nothing_is_said_of_prefixes():
    found = inventory(make_scheduler("a", "other"), None, None, now=60.0)
    assert [(holder.model, holder.prefix, holder.state) for holder in found.holders] == [
        ("m", None, "silent"),
        ("another", None, "silent"),
    ]
    assert not found.up

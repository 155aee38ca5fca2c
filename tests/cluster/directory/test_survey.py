"""What `decodefleet directory` reads from Redis, against workers that publish."""

import asyncio
from collections.abc import Iterator

import pytest
import redis as redis_client

from decodefleet.cluster.directory.holdings import leading
from decodefleet.cluster.directory.publisher import DirectoryPublisher
from decodefleet.cluster.directory.survey import DirectoryUnavailable, survey
from decodefleet.cluster.embedded_redis import EmbeddedRedis
from decodefleet.worker.protocol import KvEvents, ModelCard, Ready

PROMPT = [number.to_bytes(16, "big") for number in range(1, 11)]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


def make_publisher(url: str, worker_id: str, model: str = "m") -> DirectoryPublisher:
    card = ModelCard(
        name=model,
        folder="/models/m",
        max_model_len=1024,
        vocab_size=100,
        block_size=16,
        hash_root=b"root",
        kv_bytes_per_token=1,
    )
    ready = Ready(worker_id=worker_id, incarnation="one", endpoint="tcp://x:1", card=card, total_blocks=10)
    return DirectoryPublisher.of_worker(url, ready)


def stored(publisher: DirectoryPublisher, seq: int, blocks: list[bytes], tier: str = "gpu") -> None:
    publisher.publish(KvEvents(seq=seq, stored=b"".join(blocks), tier=tier))  # type: ignore[arg-type]


def hashes(chains) -> tuple[list[bytes], int]:
    assert chains == ("/models/m", b"root", 16)
    return PROMPT, 165


async def until_held(client: redis_client.Redis, pattern: str, slots: int) -> None:
    while [client.strlen(key) for key in client.keys(pattern)] != [slots]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_who_holds_what(server):
    near, far = make_publisher(server.url, "near"), make_publisher(server.url, "far")
    other = make_publisher(server.url, "near", model="another")
    for publisher in (near, far, other):
        await publisher.start()
    stored(near, 1, PROMPT[:4])
    stored(near, 2, PROMPT[:6], "cpu")
    stored(near, 3, PROMPT[:9], "nvme")
    stored(far, 1, PROMPT[1:])
    stored(other, 1, PROMPT)
    with redis_client.Redis.from_url(server.url) as client:
        await until_held(client, "*:m:tiers:near|*", 9)
        await until_held(client, "*:m:tiers:far|*", 9)
        await until_held(client, "*:another:tiers:*", 10)
    found = await survey(server.url, "m", hashes)
    for publisher in (near, far, other):
        await publisher.stop()
    assert (found.prompt_tokens, found.prompt_blocks) == (165, 10)
    second, first = found.holders
    assert (first.worker_id, first.incarnation, first.model) == ("near", "one", "m")
    assert first.blocks == {"gpu": 4, "cpu": 6, "nvme": 9}
    assert first.prefix == {"gpu": 4, "cpu": 6, "nvme": 9}
    assert second.blocks == {"gpu": 9, "cpu": 0, "nvme": 0}
    # without its beginning a prefix is of no use
    assert second.prefix == {"gpu": 0, "cpu": 0, "nvme": 0}
    assert first.redis_bytes is not None
    assert 17 * 9 < first.redis_bytes < 10_000
    assert first.lease_s is not None
    assert 0 < first.lease_s <= 10
    assert first.changed_s is not None
    assert (await survey(server.url)).holders == []


async def test_all_models(server):
    publishers = [make_publisher(server.url, "w", model) for model in ("a:b", "c d")]
    for publisher in publishers:
        await publisher.start()
        stored(publisher, 1, PROMPT)
    with redis_client.Redis.from_url(server.url) as client:
        for model in ("a:b", "c d"):
            await until_held(client, f"*:{model}:tiers:*", 10)
    found = await survey(server.url)
    for publisher in publishers:
        await publisher.stop()
    assert sorted(holder.model for holder in found.holders) == ["a:b", "c d"]
    assert {holder.prefix for holder in found.holders} == {None}


@pytest.mark.parametrize("url", ["unix://:secret@/nowhere/s", "http://:secret@host"])
async def test_nobody_answers(url):
    with pytest.raises(DirectoryUnavailable) as refused:
        await survey(url)
    assert "secret" not in str(refused.value)


def test_leading_blocks_per_tier():
    gpu, cpu, nvme = 0b001, 0b010, 0b100
    assert leading([gpu, gpu | cpu, cpu, nvme, 0, gpu]) == {"gpu": 2, "cpu": 3, "nvme": 4}
    assert leading([]) == {"gpu": 0, "cpu": 0, "nvme": 0}
    assert leading([nvme]) == {"gpu": 0, "cpu": 0, "nvme": 1}

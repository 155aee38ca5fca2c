"""The KV hierarchy in a whole engine: what leaves the pool comes back, and the text stays the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engines import VOCAB, Outcome, RecordingSink, make_engine, make_submit, run_all

from decodefleet.worker.engine import Engine
from decodefleet.worker.kv.tiers.slab_file import SlabForm
from decodefleet.worker.sampling_params import SamplingParams

# of the tiny model: 16 tokens, 2 layers, 1 KV head, 32 numbers of bf16, keys and values
SLAB_BYTES = 16 * 2 * 32 * 2 * 2
DOCUMENT = 160
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)


def gib(blocks: int) -> float:
    return blocks * SLAB_BYTES / (1 << 30)


def cpu_tier(blocks: int = 1024) -> dict[str, Any]:
    return {"cpu_kv_gib": gib(blocks), "kv_restore": "always"}


def nvme_tier(folder: Path, blocks: int = 1024, *, cpu: int = 0) -> dict[str, Any]:
    nvme = {"nvme_kv_path": folder, "nvme_kv_gib": gib(blocks)}
    return {**nvme, "cpu_kv_gib": gib(cpu), "kv_restore": "always"}


def documents(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB) for _ in range(DOCUMENT)] for _ in range(count)]


def ask(engine: Engine, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> Outcome:
    engine.submit(make_submit(name, prompt, params))
    return run_all(engine)[name, 0]


def answers(engine: Engine, prompts: list[list[int]], visits: int = 2) -> list[list[Outcome]]:
    """All prompts in turn, again and again."""
    return [
        [ask(engine, f"{visit}-{i}", prompt) for i, prompt in enumerate(prompts)] for visit in range(visits)
    ]


def said(outcome: Outcome) -> tuple[list[int], list[object]]:
    return outcome.tokens, [entry for delta in outcome.deltas for entry in delta.logprobs or ()]


def cached(outcome: Outcome) -> int:
    tokens = outcome.deltas[0].cached_tokens
    assert tokens is not None
    return tokens


def test_documents_that_left_the_pool_come_back_from_host_memory(tiny_llama: Path) -> None:
    prompts = documents(6)
    sink = RecordingSink()
    endless = answers(make_engine(tiny_llama, blocks=512), prompts, visits=1)[0]
    engine = make_engine(tiny_llama, blocks=24, tiers=cpu_tier(), sink=sink)
    first, second = answers(engine, prompts)
    assert [said(outcome) for outcome in first] == [said(outcome) for outcome in endless]
    assert [said(outcome) for outcome in second] == [said(outcome) for outcome in endless]
    assert [cached(outcome) for outcome in first] == [0] * 6
    assert [cached(outcome) for outcome in second] == [DOCUMENT - 16] * 6
    stats = engine.stats()
    assert stats.tiers["cpu"].restored_blocks >= 5 * 9
    assert stats.tiers["cpu"].restored_bytes == stats.tiers["cpu"].restored_blocks * SLAB_BYTES
    assert len(sink.below["cpu"]) == stats.tiers["cpu"].used_blocks
    engine.close()


@pytest.mark.parametrize("cpu", [0, 12], ids=["disk alone", "disk under a little memory"])
def test_documents_come_back_from_disk_after_a_restart(tiny_llama: Path, tmp_path: Path, cpu: int) -> None:
    prompts = documents(6)
    engine = make_engine(tiny_llama, blocks=24, tiers=nvme_tier(tmp_path, cpu=cpu))
    first, second = answers(engine, prompts)
    assert [cached(outcome) for outcome in second] == [DOCUMENT - 16] * 6
    engine.close()

    sink = RecordingSink()
    engine = make_engine(tiny_llama, blocks=24, tiers=nvme_tier(tmp_path, cpu=cpu), sink=sink)
    assert len(sink.below["nvme"]) == engine.stats().tiers["nvme"].used_blocks >= 6 * 10
    (third,) = answers(engine, prompts, visits=1)
    assert [said(outcome) for outcome in third] == [said(outcome) for outcome in first]
    assert [cached(outcome) for outcome in third] == [DOCUMENT - 16] * 6
    assert [said(outcome) for outcome in second] == [said(outcome) for outcome in first]
    engine.close()


def test_flipped_bits_are_computed_again(tiny_llama: Path, tmp_path: Path) -> None:
    (prompt,) = documents(1)
    tiers = nvme_tier(tmp_path)
    engine = make_engine(tiny_llama, blocks=24, tiers=tiers)
    first = ask(engine, "first", prompt)
    engine.close()
    (file,) = tmp_path.iterdir()
    # every slab, in the middle
    raw = bytearray(file.read_bytes())
    form = SlabForm("", SLAB_BYTES, 1024)
    for slot in range(form.slots):
        raw[form.slabs_start + slot * form.stride + 1000] ^= 1
    file.write_bytes(raw)

    engine = make_engine(tiny_llama, blocks=24, tiers=tiers)
    again = ask(engine, "again", prompt)
    assert said(again) == said(first)
    assert cached(again) == 0
    stats = engine.stats()
    assert stats.tiers["nvme"].corrupt_blocks == 9
    assert stats.tiers["nvme"].total_blocks == 1024, "a damaged block is no reason to do without the disk"
    # what was computed again is whole on disk
    engine._pool.clear_cache()
    assert cached(ask(engine, "third", prompt)) == DOCUMENT - 16
    engine.close()

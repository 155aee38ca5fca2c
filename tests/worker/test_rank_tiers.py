"""KV tiers of a model on several ranks: one index, a part of each block on every rank, and the same text."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from documents import (
    DOCUMENT,
    GREEDY,
    SLAB_BYTES,
    answers,
    ask,
    cached,
    cpu_tier,
    documents,
    gib,
    nvme_tier,
    said,
)
from engines import Outcome, RecordingSink, make_engine, make_submit, run_all, write_tiny_llama

from decodefleet.worker.engine import Engine
from decodefleet.worker.kv.tiers.slab_file import PAGE, RECORD_BYTES, SlabForm
from decodefleet.worker.sampling_params import SamplingParams

RANKS = 2
DISK = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A KV head for each rank, so that a rank's slabs are as large as those of `documents.SLAB_BYTES`."""
    return write_tiny_llama(tmp_path_factory.mktemp("model"), kv_heads=2)


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, object]:
    return nvme_tier(tmp_path / "kv", RANKS * DISK)


def gang(folder: Path, tiers: dict[str, object], **options: object) -> Engine:
    return make_engine(folder, tensor_parallel_size=RANKS, tiers=tiers, **{"blocks": 24, **options})


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[Outcome]:
    """What two ranks without tiers say, each document computed once."""
    engine = gang(folder, {}, blocks=512)
    found = answers(engine, documents(4), visits=1)[0]
    engine.close()
    return found


def test_documents_come_back_from_the_memory_of_both_ranks(folder: Path, wanted: list[Outcome]) -> None:
    sink = RecordingSink()
    engine = gang(folder, cpu_tier(), sink=sink)
    first, second = answers(engine, documents(4))
    assert [said(outcome) for outcome in first] == [said(outcome) for outcome in wanted]
    assert [said(outcome) for outcome in second] == [said(outcome) for outcome in wanted]
    assert [cached(outcome) for outcome in second] == [DOCUMENT - 16] * 4
    stats = engine.stats().tiers["cpu"]
    assert stats.restored_blocks >= 3 * 9
    assert stats.total_blocks == 1024 // RANKS, "both ranks have their part of the memory"
    assert len(sink.below["cpu"]) == stats.used_blocks
    engine.close()


def test_preempted_sequences_go_on_where_they_were(folder: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=120, ignore_eos=True, logprobs=1)
    prompts = [prompt[:10] for prompt in documents(8)]
    roomy = gang(folder, {}, blocks=128)
    wanted = [ask(roomy, str(i), prompt, params) for i, prompt in enumerate(prompts)]
    roomy.close()
    engine = gang(folder, cpu_tier(), blocks=11)
    for i, prompt in enumerate(prompts):
        engine.submit(make_submit(str(i), prompt, params))
    outcomes = run_all(engine)
    assert [said(outcomes[str(i), 0]) for i in range(8)] == [said(outcome) for outcome in wanted]
    stats = engine.stats()
    assert stats.swapped == stats.preemptions > 8
    assert stats.prompt_tokens == sum(map(len, prompts)), "no prompt was computed twice"
    engine.close()


def test_documents_come_back_from_both_disks_after_a_restart(
    folder: Path, disk: dict[str, object], wanted: list[Outcome]
) -> None:
    fill(folder, disk)
    assert [path.name for path in files(disk)] == ["kv-00.rank1.slab", "kv-00.slab"]
    engine = gang(folder, disk)
    again = answers(engine, documents(4), visits=1)[0]
    assert [said(outcome) for outcome in again] == [said(outcome) for outcome in wanted]
    assert [cached(outcome) for outcome in again] == [DOCUMENT - 16] * 4
    engine.reset_prefix_cache()
    engine.close()
    engine = gang(folder, disk)
    assert engine.stats().tiers["nvme"].used_blocks == 0, "forgotten on all ranks"
    engine.close()


def test_a_flipped_bit_on_one_rank_is_a_miss_on_all(
    folder: Path, disk: dict[str, object], wanted: list[Outcome]
) -> None:
    fill(folder, disk)
    form = form_of(disk)
    raw = bytearray(files(disk)[0].read_bytes())
    for slot in range(form.slots):
        raw[form.slabs_start + slot * form.stride + 1000] ^= 1
    files(disk)[0].write_bytes(raw)

    engine = gang(folder, disk)
    again = ask(engine, "again", documents(1)[0])
    assert cached(again) == 0
    assert said(again) == said(wanted[0])
    assert engine.stats().tiers["nvme"].corrupt_blocks == 9
    engine._pool.clear_cache()
    assert cached(ask(engine, "third", documents(1)[0])) == DOCUMENT - 16, "it was written anew, on both"
    engine.close()


def test_what_one_rank_did_not_write_is_not_there(folder: Path, disk: dict[str, object]) -> None:
    fill(folder, disk)
    path, form = files(disk)[0], form_of(disk)
    raw = bytearray(path.read_bytes())
    # as where it was killed before its first block
    raw[PAGE : PAGE + RECORD_BYTES] = bytes(RECORD_BYTES)
    path.write_bytes(raw)
    engine = gang(folder, disk)
    assert engine.stats().tiers["nvme"].used_blocks == 4 * 10 - 1 < form.slots
    engine.close()


def test_a_disk_that_one_rank_cannot_have_is_left_out(
    folder: Path, disk: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    fill(folder, disk)
    with files(disk)[0].open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        engine = gang(folder, {**disk, "cpu_kv_gib": gib(64)})
    assert engine.stats().tiers.keys() == {"cpu"}
    (warning,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "rank 1: " in warning
    assert "another process has the rank's slab file" in warning
    assert len(ask(engine, "r", documents(1)[0], GREEDY).tokens) == 8
    engine.close()


def fill(folder: Path, disk: dict[str, object]) -> None:
    engine = gang(folder, disk)
    answers(engine, documents(4), visits=1)
    engine.close()


def files(disk: dict[str, object]) -> list[Path]:
    return sorted(Path(str(disk["nvme_kv_path"])).iterdir())


def form_of(disk: dict[str, object]) -> SlabForm:
    """Of a rank's file, as far as places go."""
    return SlabForm("", SLAB_BYTES, DISK)

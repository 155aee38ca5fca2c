"""The KV hierarchy in a whole engine: what leaves the pool comes back, and the text stays the same."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
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
    nvme_tier,
    said,
)
from engines import RecordingSink, make_engine, make_submit, run_all

from decodefleet.worker.kv.tiers.cost import Link
from decodefleet.worker.kv.tiers.slab_file import SlabForm
from decodefleet.worker.sampling_params import SamplingParams


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


def test_twenty_sequences_in_a_pool_for_little_more_than_one(tiny_llama: Path) -> None:
    prompts = [prompt[: 60 + 5 * i] for i, prompt in enumerate(documents(20))]
    wanted = answers(make_engine(tiny_llama, blocks=512), prompts, visits=1)[0]
    # the longest has 163 tokens with its answer: 11 blocks
    engine = make_engine(tiny_llama, blocks=13, max_num_seqs=20, tiers=cpu_tier())
    for i, prompt in enumerate(prompts):
        engine.submit(make_submit(str(i), prompt, GREEDY))
    outcomes = run_all(engine)
    assert [said(outcomes[str(i), 0]) for i in range(20)] == [said(outcome) for outcome in wanted]
    engine.close()


def test_preempted_sequences_go_on_where_they_were(tiny_llama: Path) -> None:
    """Long answers to short prompts: all are admitted, and none fits beside another for long."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=120, ignore_eos=True, logprobs=1)
    prompts = [prompt[:10] for prompt in documents(20)]
    wanted = [ask(make_engine(tiny_llama, blocks=64), "r", prompt, params) for prompt in prompts]
    engine = make_engine(tiny_llama, blocks=11, max_num_seqs=20, tiers=cpu_tier())
    for i, prompt in enumerate(prompts):
        engine.submit(make_submit(str(i), prompt, params))
    outcomes = run_all(engine)
    assert [said(outcomes[str(i), 0]) for i in range(20)] == [said(outcome) for outcome in wanted]
    stats = engine.stats()
    assert stats.swapped == stats.preemptions > 20
    assert stats.prompt_tokens == sum(map(len, prompts)), "no prompt was computed twice"
    engine.close()


def test_blocks_come_back_when_requests_go_away_while_they_are_restored(tiny_llama: Path) -> None:
    prompts = documents(6)
    engine = make_engine(tiny_llama, blocks=24, tiers=cpu_tier())
    answers(engine, prompts, visits=1)
    for i, prompt in enumerate(prompts):
        engine.submit(make_submit(f"leaves-{i}", prompt, GREEDY))
        engine.step()
        engine.abort(f"leaves-{i}", 0)
        engine.check_integrity()
    run_all(engine)
    engine.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """About tiers."""
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in warnings if "tier of the KV cache" in message]


def test_a_disk_that_fails_ends_its_tier_and_no_request(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # more than are still on their way through memory
    prompts = documents(8)
    sink = RecordingSink()
    engine = make_engine(tiny_llama, blocks=24, tiers=nvme_tier(tmp_path), sink=sink)
    (first,) = answers(engine, prompts, visits=1)
    (file,) = tmp_path.iterdir()
    os.truncate(file, 4096)
    (second,) = answers(engine, prompts, visits=1)
    assert [said(outcome) for outcome in second] == [said(outcome) for outcome in first]
    assert engine.stats().tiers["nvme"].total_blocks == 0
    assert sink.below["nvme"] == set()
    assert warnings_of(caplog) == [
        "the nvme tier of the KV cache is switched off: [Errno 5] the file ends early"
    ]
    engine.close()


def test_a_disk_that_fills_up_ends_its_tier_and_no_request(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = documents(3)
    wanted = answers(make_engine(tiny_llama, blocks=512), prompts, visits=1)[0]
    engine = make_engine(tiny_llama, blocks=24, tiers=nvme_tier(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        (found,) = answers(engine, prompts, visits=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [said(outcome) for outcome in found] == [said(outcome) for outcome in wanted]
    assert engine.stats().tiers["nvme"].total_blocks == 0
    assert ["switched off" in message for message in warnings_of(caplog)] == [True]
    engine.close()


def test_a_folder_that_cannot_be_had_is_said_once(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = documents(2)
    engine = make_engine(tiny_llama, blocks=24, tiers=nvme_tier(Path("/dev/null/kv")))
    answers(engine, prompts)
    assert ["left out" in message for message in warnings_of(caplog)] == [True]
    assert engine.stats().tiers == {}
    engine.close()


@pytest.mark.parametrize(("bytes_per_s", "restored"), [(1e3, False), (1e15, True)])
def test_blocks_are_restored_where_that_is_faster_than_computing_them(
    tiny_llama: Path, bytes_per_s: float, restored: bool
) -> None:
    (prompt,) = documents(1)
    engine = make_engine(tiny_llama, blocks=24, tiers={**cpu_tier(), "kv_restore": "auto"})
    assert engine._tiers is not None
    (tier,) = engine._tiers._tiers
    tier.link = Link(0.0, 1e15)
    ask(engine, "first", prompt)
    engine._pool.clear_cache()
    tier.link = Link(0.0, bytes_per_s)
    assert cached(ask(engine, "second", prompt)) == (DOCUMENT - 16 if restored else 0)
    assert engine.stats().tiers["cpu"].bytes_per_s < 1e15, (
        "it has learnt what this machine is like" if restored else ""
    )
    engine.close()


def test_what_costs_more_to_bring_back_than_to_compute_is_not_kept(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, blocks=24, tiers={**cpu_tier(), "kv_restore": "auto"})
    assert engine._tiers is not None
    engine._tiers._tiers[0].link = Link(0.0, 1e3)
    answers(engine, documents(2), visits=1)
    # the judgement is made anew every few steps
    assert engine.stats().tiers["cpu"].stored_bytes <= 8 * 64 // 16 * SLAB_BYTES
    engine.close()


def test_resetting_the_cache_empties_all_tiers_for_good(tiny_llama: Path, tmp_path: Path) -> None:
    (prompt,) = documents(1)
    engine = make_engine(tiny_llama, blocks=24, tiers=nvme_tier(tmp_path, cpu=64))
    ask(engine, "first", prompt)
    assert engine.reset_prefix_cache() > 10
    assert cached(ask(engine, "second", prompt)) == 0
    engine.reset_prefix_cache()
    engine.close()
    engine = make_engine(tiny_llama, blocks=24, tiers=nvme_tier(tmp_path, cpu=64))
    assert cached(ask(engine, "third", prompt)) == 0
    engine.close()


def test_tenants_do_not_meet_below_either(tiny_llama: Path, tmp_path: Path) -> None:
    (prompt,) = documents(1)
    engine = make_engine(tiny_llama, blocks=24, tiers=nvme_tier(tmp_path, cpu=64))
    for i, salt in enumerate(("a", "b", "a")):
        engine.submit(make_submit(str(i), prompt, GREEDY, cache_salt=salt))
        (outcome,) = run_all(engine).values()
        assert cached(outcome) == (DOCUMENT - 16 if i == 2 else 0)
        engine._pool.clear_cache()
    engine.close()


def test_prompts_whose_logprobs_are_asked_for_read_no_tier(tiny_llama: Path) -> None:
    (prompt,) = documents(1)
    engine = make_engine(tiny_llama, blocks=24, tiers=cpu_tier())
    scoring = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    first = ask(engine, "first", prompt, scoring)
    engine._pool.clear_cache()
    second = ask(engine, "second", prompt, scoring)
    assert cached(second) == 0
    assert second.deltas[0].prompt_logprobs == first.deltas[0].prompt_logprobs
    assert len(first.deltas[0].prompt_logprobs or ()) == DOCUMENT - 1
    engine.close()


def test_a_killed_worker_finds_its_blocks_again(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = documents(4)
    script = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from engines import make_engine, make_submit, run_all
from decodefleet.worker.sampling_params import SamplingParams
engine = make_engine(Path({str(tiny_llama)!r}), blocks=24, tiers={nvme_tier(tmp_path)!r})
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
for i, prompt in enumerate({prompts!r}):
    engine.submit(make_submit(str(i), prompt, params))
    run_all(engine)
os.kill(os.getpid(), 9)
"""
    script = script.replace("PosixPath", "Path")
    killed = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    wanted = answers(make_engine(tiny_llama, blocks=512), prompts, visits=1)[0]
    engine = make_engine(tiny_llama, blocks=24, tiers=nvme_tier(tmp_path))
    (found,) = answers(engine, prompts, visits=1)
    assert [cached(outcome) for outcome in found] == [DOCUMENT - 16] * 4
    assert [said(outcome) for outcome in found] == [said(outcome) for outcome in wanted]
    engine.close()

"""What sequences get back from below the pool, while others run on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kv_parts import BLOCK, HYBRID, ROOT, Setup, fill_and_forget, prompt

from decodefleet.worker.kv.hashing import extend_chain
from decodefleet.worker.sequence import State


def test_a_prefix_comes_back_while_others_run_on() -> None:
    setup = Setup()
    tokens = fill_and_forget(setup)
    other = setup.add(prompt(2, 4), output=8)
    setup.step()
    seq = setup.add(tokens)
    plan = setup.step()
    assert seq.restoring
    assert [chunk.seq for chunk in plan.chunks] == [other]
    assert setup.step().chunks[0].seq is other
    setup.work()
    plan = setup.step()
    assert not seq.restoring
    assert [(chunk.seq, chunk.start) for chunk in plan.chunks] == [(other, 6), (seq, 20)]
    assert seq.cached_tokens == 20
    setup.run()


def test_sequences_that_need_the_same_blocks_share_one_load() -> None:
    setup = Setup()
    tokens = fill_and_forget(setup)
    first = setup.add(tokens)
    setup.step()
    second = setup.add([*tokens, 7, 8, 9])
    setup.step()
    assert second.restoring
    assert first.blocks[0].ids[:5] == second.blocks[0].ids[:5]
    setup.run()
    assert setup.tiers.stats()["cpu"].restored_blocks == 6, "five for both, and one that the first computes"
    assert (first.cached_tokens, second.cached_tokens) == (20, 24)


def test_all_comes_back_when_a_sequence_is_aborted_while_it_is_restored() -> None:
    setup = Setup()
    tokens = fill_and_forget(setup)
    for jobs_run in range(3):
        seq = setup.add(tokens)
        setup.step()
        for _ in range(jobs_run):
            assert any(executor.run() for executor in setup.executors)
        setup.batcher.remove(seq)
        setup.check()
        setup.run()
        assert setup.pool.available == setup.pool.total
        setup.pool.clear_cache()


def test_jobs_that_nobody_waits_for_any_more_are_not_begun() -> None:
    setup = Setup()
    seq = setup.add(fill_and_forget(setup))
    setup.step()
    setup.batcher.remove(seq)
    assert setup.pool.available == setup.pool.total, "at once, not when the copies would have been made"
    assert not setup.work()
    setup.run()
    assert setup.tiers.stats()["cpu"].restored_blocks == 0


def test_a_sequence_whose_blocks_are_lost_on_the_way_computes_them() -> None:
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(cpu=0, disk=Path(folder))
        # more than the stage holds, so that the first of it is on disk alone
        tokens = fill_and_forget(setup)
        for base in range(2, 20):
            setup.add(prompt(base))
            setup.run()
        setup.pool.clear_cache()
        seq = setup.add(tokens)
        setup.step()
        assert seq.restoring
        (file,) = Path(folder).iterdir()
        os.truncate(file, 100)
        setup.run()
        assert seq.state is State.FINISHED
        assert seq.cached_tokens == 0
        assert setup.tiers.stats()["nvme"].total_blocks == 0
        assert setup.sink.below["nvme"] == set()


def test_a_tier_that_does_not_answer_is_given_up_and_its_blocks_come_back_late() -> None:
    setup = Setup()
    tokens = fill_and_forget(setup)
    seq = setup.add(tokens)
    setup.step()
    assert seq.restoring
    for executor in setup.executors:
        executor.begin()
    setup.tiers._loader.patience_s = 0.0
    while seq.state is not State.FINISHED:
        setup.step()
        setup.check()
    assert seq.cached_tokens == 0
    assert setup.tiers.stats()["cpu"].total_blocks == 0
    assert setup.pool.available == setup.pool.total - len(setup.tiers.held_blocks()) < setup.pool.total
    setup.run()
    assert setup.pool.available == setup.pool.total


def test_a_process_that_was_frozen_does_not_blame_its_tiers() -> None:
    setup = Setup()
    seq = setup.add(fill_and_forget(setup))
    setup.step()
    # SIGSTOP, a minute, SIGCONT
    setup.tiers._loader._looked -= 60.0
    setup.step()
    setup.run()
    assert seq.cached_tokens == 20


def test_the_kv_of_a_preempted_sequence_comes_back_with_its_last_tokens() -> None:
    setup = Setup(blocks=13)
    old, new = setup.add(prompt(1, 20), output=20), setup.add(prompt(2, 17), output=20)
    preempted_at = 0
    while not setup.batcher.preemptions:
        preempted_at = new.computed
        setup.step()
        setup.work()
    assert preempted_at % BLOCK, "in the middle of a block"
    computed = {new: preempted_at}
    while old.state is not State.FINISHED:
        setup.step()
    while setup.batcher.waiting:
        setup.step()
    assert new.restoring or new.computed >= computed[new]
    setup.work()
    (chunk,) = setup.step().chunks
    assert (chunk.seq, chunk.start, chunk.count) == (new, preempted_at, 1)
    setup.run()
    assert setup.kv.swapped == setup.batcher.preemptions == 1


def test_a_block_that_was_to_be_copied_is_kept_as_it_will_be() -> None:
    """Preempted by the plan that gives it its own copy of a shared block: the copy is never made."""
    setup = Setup(blocks=11, seqs=5, budget=24)
    parent = setup.add(prompt(1, 6), output=12)
    setup.step()
    long = setup.add(prompt(2, 32), priority=-1)
    while not long.computed:
        setup.step()
    children = []
    for _ in range(3):
        child = setup.make(parent.request.prompt, 12)
        child.tokens = list(parent.tokens)
        setup.kv.fork(parent, child)
        setup.batcher.start_forked(child)
        children.append(child)
    setup.step()
    assert [child.state for child in children] == [State.RUNNING, State.WAITING, State.WAITING]
    setup.run()
    assert setup.kv.swapped >= 2


def test_blocks_are_found_under_the_names_their_group_gives_them() -> None:
    setup = Setup(HYBRID, blocks=64)
    tokens = fill_and_forget(setup)
    assert setup.sink.below["cpu"] == set(extend_chain(ROOT, [*tokens, 24, 25, 26, 27], BLOCK)), (
        "the sink hears of group 0"
    )
    seq = setup.add(tokens)
    setup.step()
    assert seq.restoring
    setup.run()
    assert seq.cached_tokens == 20

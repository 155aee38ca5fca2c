"""Batcher, manager, tiers and their files, without a model: a step writes what it computes and checks what it
reads, so that a block that is lost, mixed up or overwritten too early shows at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from engines import RecordingSink
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lazy_executor import LazyExecutor
from second_rank import SecondRank

from decodefleet.worker.batcher import Batcher, StepPlan
from decodefleet.worker.config import BatchConfig, CacheConfig
from decodefleet.worker.kv.block_pool import BlockPool
from decodefleet.worker.kv.groups import FULL, PLAIN, KvGroups, WindowRule
from decodefleet.worker.kv.hashing import extend_chain
from decodefleet.worker.kv.manager import KvManager
from decodefleet.worker.kv.tiers.opening import open_tiers
from decodefleet.worker.kv.tiers.slab_file import SlabForm
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.sequence import Request, Sequence, State

BLOCK = 4
SLAB_BYTES = BLOCK * 8
ROOT = b"root"
DISK = 160
HYBRID = KvGroups.of([FULL, WindowRule(6)])
SINKS = KvGroups.of([WindowRule(6, sinks=3)])


def gib(blocks: int) -> float:
    return blocks * SLAB_BYTES / (1 << 30)


class Setup:
    """An engine's parts, with a model whose keys are a hash of all tokens up to theirs.

    keys: of each rank, whose are not those of the other.
    """

    def __init__(
        self,
        groups: KvGroups = PLAIN,
        *,
        blocks: int = 24,
        seqs: int = 4,
        budget: int = 10,
        cpu: int = 64,
        disk: Path | None = None,
        ranks: int = 1,
    ) -> None:
        self.sink = RecordingSink()
        self.pool = BlockPool(blocks, self.sink)
        slabs = [torch.zeros((blocks + 1, SLAB_BYTES), dtype=torch.uint8) for _ in range(ranks)]
        self.keys = [each.view(torch.int64) for each in slabs]
        cache = CacheConfig(
            cpu_kv_gib=gib(cpu * ranks), nvme_kv_path=disk, nvme_kv_gib=gib(DISK * ranks), kv_restore="always"
        )
        self.executors: list[LazyExecutor] = []
        self.other = SecondRank(slabs[1], disk, self._executor, self.work) if ranks > 1 else None
        tiers = open_tiers(cache, slabs[0], self.pool, self.sink, ROOT, self.other, self._executor)
        assert tiers is not None
        self.tiers = tiers
        for executor in self.executors:
            executor.hold = True
        self.kv = KvManager(self.pool, BLOCK, groups, prefix_caching=True, max_chunk=10, tiers=tiers)
        self.batcher = Batcher(BatchConfig(max_num_seqs=seqs, max_num_batched_tokens=budget), self.kv)
        self.arrivals = 0

    def _executor(self, threads: int) -> LazyExecutor:
        self.executors.append(LazyExecutor())
        return self.executors[-1]

    def add(self, prompt: list[int], *, output: int = 5, priority: int = 0) -> Sequence:
        seq = self.make(prompt, output, priority)
        self.batcher.add(seq)
        return seq

    def make(self, prompt: list[int], output: int, priority: int = 0) -> Sequence:
        order = (priority, self.arrivals)
        request = Request(str(self.arrivals), 0, SamplingParams(), prompt, ROOT, output, frozenset(), order)
        self.arrivals += 1
        seq = Sequence(request, 0, 0, list(prompt), extend_chain(ROOT, prompt, BLOCK))
        request.live.append(seq)
        return seq

    def step(self) -> StepPlan:
        self.tiers.poll()
        plan = self.batcher.plan()
        self.tiers.dispatch()
        for source, target in plan.copies:
            for keys in self.keys:
                keys[target] = keys[source]
        for chunk in plan.chunks:
            self._read(chunk.seq, chunk.start)
        for chunk in plan.chunks:
            self._write(chunk.seq, chunk.start, chunk.start + chunk.count)
        for chunk in plan.chunks:
            seq = chunk.seq
            seq.computed += chunk.count
            self.kv.commit(seq)
            if chunk.samples:
                seq.tokens.append(len(seq.tokens))
                if seq.output_tokens >= seq.request.max_tokens:
                    self.batcher.remove(seq)
        return plan

    def _read(self, seq: Sequence, end: int) -> None:
        """All that the token at `end` sees must be there."""
        for g, (own, group) in enumerate(zip(seq.blocks, self.kv.groups.groups, strict=True)):
            seen = {*range(min(group.rule.sinks, end)), *range(group.rule.first_seen(end), end)}
            for position in seen:
                for rank, keys in enumerate(self.keys):
                    found = keys[own.ids[position // BLOCK], position % BLOCK].item()
                    wanted = key(g, seq.tokens[: position + 1], rank)
                    assert found == wanted, f"token {position} in group {g} on rank {rank}"

    def _write(self, seq: Sequence, start: int, end: int) -> None:
        for g, own in enumerate(seq.blocks):
            for position in range(start, end):
                for rank, keys in enumerate(self.keys):
                    written = key(g, seq.tokens[: position + 1], rank)
                    keys[own.ids[position // BLOCK], position % BLOCK] = written

    def work(self) -> bool:
        """Every job that waits, until none does."""
        worked = False
        while any(executor.run() for executor in self.executors):
            worked = True
        return worked

    def run(self) -> None:
        """To the end of all sequences and transfers."""
        while self.batcher.running or self.batcher.waiting or self.tiers.busy:
            plan = self.step()
            assert plan.chunks or self.work() or not self.batcher.running
            self.check()

    def check(self) -> None:
        self.batcher.check_integrity()

    def close(self) -> None:
        self.tiers.close()
        if self.other is not None:
            self.other.close()


def key(group: int, tokens: list[int], rank: int) -> int:
    return hash((group, rank, *tokens))


def prompt(base: int, length: int = 24) -> list[int]:
    return [base * 100 + i for i in range(length)]


def fill_and_forget(setup: Setup, base: int = 1) -> list[int]:
    """A prompt whose blocks are in the CPU tier and not in the pool."""
    tokens = prompt(base)
    setup.add(tokens)
    setup.run()
    setup.pool.clear_cache()
    return tokens


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


def flip(file: Path, slot: int, byte: int) -> None:
    """Damage a byte of a slab on disk."""
    form = SlabForm("", SLAB_BYTES, DISK)
    with file.open("r+b") as raw:
        raw.seek(form.slabs_start + slot * form.stride + byte)
        found = raw.read(1)
        if found:
            raw.seek(-1, os.SEEK_CUR)
            raw.write(bytes([found[0] ^ 255]))


class TiersMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, forks, steps, copies that take their time, and tiers that fail."""

    @initialize(
        groups=st.sampled_from([PLAIN, HYBRID, SINKS]),
        cpu=st.sampled_from([0, 4, 10, 64]),
        disk=st.booleans(),
        blocks=st.sampled_from([16, 20]),
        ranks=st.sampled_from([1, 2]),
    )
    def start(self, groups: KvGroups, cpu: int, disk: bool, blocks: int, ranks: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.disk = Path(self.folder.name) if disk or not cpu else None
        self.setup = Setup(groups, blocks=blocks * len(groups), cpu=cpu, disk=self.disk, ranks=ranks)
        self.seqs: list[Sequence] = []

    @property
    def alive(self) -> list[Sequence]:
        return [seq for seq in self.seqs if seq.state is not State.FINISHED]

    @rule(
        lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
        base=st.integers(0, 2),
        output=st.integers(1, 30),
        priority=st.integers(0, 1),
    )
    def arrive(self, lengths: list[int], base: int, output: int, priority: int) -> None:
        for i, length in enumerate(lengths):
            tokens = prompt(base + i, length)
            self.seqs.append(self.setup.add(tokens, output=output, priority=priority))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.setup.batcher.remove(data.draw(st.sampled_from(self.alive)))

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parents = [seq for seq in self.setup.batcher.running if not seq.restoring]
        if not parents or not self.setup.batcher.has_room:
            return
        parent = data.draw(st.sampled_from(parents))
        child = self.setup.make(parent.request.prompt, parent.request.max_tokens)
        child.tokens = list(parent.tokens)
        self.setup.kv.fork(parent, child)
        self.setup.batcher.start_forked(child)
        self.seqs.append(child)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            plan = self.setup.step()
            assert plan.chunks or not self.alive or any(seq.restoring for seq in self.alive)

    @rule(data=st.data(), jobs=st.integers(1, 6))
    def work(self, data: st.DataObject, jobs: int) -> None:
        for _ in range(jobs):
            data.draw(st.sampled_from(self.setup.executors)).run()

    @rule(rounds=st.integers(1, 3))
    def work_all(self, rounds: int) -> None:
        for _ in range(rounds):
            self.setup.work()
            self.setup.tiers.poll()

    @rule()
    def forget_the_pool(self) -> None:
        self.setup.pool.clear_cache()

    @rule()
    def forget_all(self) -> None:
        self.setup.tiers.clear()

    @precondition(lambda self: self.disk is not None)
    @rule(number=st.integers(0, DISK), byte=st.integers(0, SLAB_BYTES - 1), data=st.data())
    def rot(self, number: int, byte: int, data: st.DataObject) -> None:
        assert self.disk is not None
        slots = [entry.slot for entry in self.setup.tiers._tiers[-1].slots._entries.values()]
        if slots:
            flip(data.draw(st.sampled_from(sorted(self.disk.iterdir()))), slots[number % len(slots)], byte)

    @precondition(lambda self: self.disk is not None and len(self.seqs) > 12)
    @rule(data=st.data())
    def lose_the_disk(self, data: st.DataObject) -> None:
        assert self.disk is not None
        os.truncate(data.draw(st.sampled_from(sorted(self.disk.iterdir()))), 0)

    @invariant()
    def accounts_add_up(self) -> None:
        if hasattr(self, "setup"):
            self.setup.check()

    def teardown(self) -> None:
        if not hasattr(self, "setup"):
            return
        self.setup.run()
        assert not self.alive
        assert self.setup.pool.available == self.setup.pool.total
        assert not self.setup.tiers.held_blocks()
        for tier in self.setup.tiers._tiers:
            assert not any(entry.pins for entry in tier.slots._entries.values())
            assert not tier.slots._leaving
        self.setup.close()
        self.folder.cleanup()


TiersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTiersMachine = TiersMachine.TestCase

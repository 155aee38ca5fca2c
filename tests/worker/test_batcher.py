"""The batcher with the real KV manager and no model: a step computes what the plan says."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decodefleet.worker.batcher import Batcher, StepPlan
from decodefleet.worker.config import BatchConfig
from decodefleet.worker.kv.block_pool import BlockPool
from decodefleet.worker.kv.groups import FULL, PLAIN, KvGroups, WindowRule
from decodefleet.worker.kv.hashing import extend_chain
from decodefleet.worker.kv.manager import KvManager
from decodefleet.worker.protocol import StepTime
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.sequence import Request, Sequence, State

BLOCK = 4


def make_batcher(blocks: int = 32, *, seqs: int = 8, budget: int = 16, groups: KvGroups = PLAIN) -> Batcher:
    config = BatchConfig(max_num_seqs=seqs, max_num_batched_tokens=budget)
    kv = KvManager(BlockPool(blocks), BLOCK, groups, prefix_caching=True, max_chunk=budget)
    return Batcher(config, kv)


def make_sequence(arrival: int, prompt: list[int], *, output: int = 5, priority: int = 0) -> Sequence:
    request = Request(
        request_id=str(arrival),
        attempt=0,
        params=SamplingParams(),
        prompt=prompt,
        root_hash=b"root",
        max_tokens=output,
        end_tokens=frozenset(),
        order=(priority, arrival),
    )
    seq = Sequence(request, 0, 0, list(prompt), extend_chain(b"root", prompt, BLOCK))
    request.live.append(seq)
    return seq


def run(batcher: Batcher, plan: StepPlan) -> list[Sequence]:
    """Pretend to compute: token = position. Returns the sequences that ended."""
    ended = []
    for chunk in plan.chunks:
        seq = chunk.seq
        assert chunk.start == seq.computed
        assert seq.state is State.RUNNING
        assert all(len(own.ids) * BLOCK >= chunk.start + chunk.count for own in seq.blocks)
        seq.computed += chunk.count
        batcher.kv.commit(seq)
        if chunk.samples:
            seq.tokens.append(len(seq.tokens))
            if seq.output_tokens >= seq.request.max_tokens:
                batcher.remove(seq)
                ended.append(seq)
    return ended


def finish(batcher: Batcher) -> list[Sequence]:
    ended: list[Sequence] = []
    while batcher.running or batcher.waiting:
        plan = batcher.plan()
        assert plan.chunks, "work is left and nothing is planned"
        ended += run(batcher, plan)
        batcher.check_integrity()
    return ended


def test_decodes_come_before_prefill_chunks() -> None:
    batcher = make_batcher(budget=8)
    decoding, long = make_sequence(0, [1, 2]), make_sequence(1, list(range(30)))
    batcher.add(decoding)
    run(batcher, batcher.plan())
    batcher.add(long)
    plan = batcher.plan()
    assert [(chunk.seq, chunk.count, chunk.samples) for chunk in plan.chunks] == [
        (decoding, 1, True),
        (long, 7, False),
    ]
    assert plan.tokens == 8


def test_the_budget_is_never_exceeded_and_prompts_are_chunked() -> None:
    batcher = make_batcher(budget=8)
    for i in range(4):
        batcher.add(make_sequence(i, [i] * 11))
    seen = []
    while batcher.waiting or any(not seq.decoding for seq in batcher.running):
        plan = batcher.plan()
        assert plan.tokens <= 8
        seen.append(plan.tokens)
        run(batcher, plan)
    assert seen[:4] == [8, 8, 8, 8]


def test_beside_decodes_prefill_is_cut_to_what_the_target_leaves() -> None:
    batcher = make_batcher(blocks=64, budget=64)
    batcher.step_time = StepTime(base=0.004, prefill_token=0.001, kv_token=0.0, sequence=0.001)
    batcher.add(make_sequence(0, [*range(3)], output=20))
    batcher.add(make_sequence(1, [*range(100, 160)], output=20))
    plan = batcher.plan()
    assert [chunk.count for chunk in plan.chunks] == [3, 60]
    run(batcher, plan)
    batcher.add(make_sequence(2, [*range(200, 300)]))
    for ms, expected in ((0.9, 55), (9.0, 5), (100.0, BLOCK), (1.9, 26)):
        batcher.step_time = StepTime(base=0.005, prefill_token=ms / 1000, kv_token=0.0, sequence=0.010)
        plan = batcher.plan()
        assert [chunk.count for chunk in plan.chunks] == [1, 1, expected]
        run(batcher, plan)
    # steps that miss the target by decodes alone: half of them is for prefill
    batcher.step_time = StepTime(base=0.105, prefill_token=0.0099, kv_token=0.0, sequence=0.0)
    assert [chunk.count for chunk in batcher.plan().chunks] == [1, 1, 10]
    assert finish(batcher)


def test_a_cached_prefix_is_not_computed_again_but_its_last_token_is() -> None:
    batcher = make_batcher()
    first = make_sequence(0, list(range(12)), output=1)
    batcher.add(first)
    finish(batcher)
    second = make_sequence(1, list(range(12)), output=1)
    batcher.add(second)
    (chunk,) = batcher.plan().chunks
    assert (chunk.start, chunk.count) == (8, 4)
    assert second.cached_tokens == 8
    assert batcher.kv.hit_tokens == 8


def test_the_newest_is_preempted_and_the_oldest_never() -> None:
    batcher = make_batcher(blocks=6, budget=64)
    seqs = [make_sequence(i, [10 * i + j for j in range(7)], output=12) for i in range(3)]
    for seq in seqs:
        batcher.add(seq)
    ended = []
    while batcher.running or batcher.waiting:
        plan = batcher.plan()
        alive = [seq for seq in seqs if seq.state is not State.FINISHED]
        assert alive[0].state is State.RUNNING
        ended += run(batcher, plan)
        batcher.check_integrity()
    assert batcher.preemptions > 0
    assert ended[0] is seqs[0]
    assert all(seq.output_tokens == 12 for seq in seqs)


def test_twenty_sequences_share_a_pool_for_little_more_than_one() -> None:
    batcher = make_batcher(blocks=6, budget=32)
    for i in range(20):
        batcher.add(make_sequence(i, [i] * 10, output=10))
    assert len(finish(batcher)) == 20


def test_windows_give_memory_back_to_those_that_wait() -> None:
    """Twenty sequences of twenty blocks each, in a pool that holds little more than one window."""
    groups = KvGroups.of([WindowRule(6, sinks=2)])
    blocks = groups.most_blocks(80, BLOCK, chunk=8) + 1
    batcher = make_batcher(blocks, budget=8, groups=groups)
    for i in range(20):
        batcher.add(make_sequence(i, [i] * 60, output=20))
    assert len(finish(batcher)) == 20
    assert blocks == 7


def test_priority_is_served_first() -> None:
    batcher = make_batcher(seqs=1)
    low, high = make_sequence(0, [1] * 4), make_sequence(1, [2] * 4, priority=-5)
    batcher.add(low)
    batcher.add(high)
    assert finish(batcher) == [high, low]


def test_a_fork_copies_the_shared_block_when_it_is_written() -> None:
    batcher = make_batcher()
    parent = make_sequence(0, list(range(6)))
    batcher.add(parent)
    run(batcher, batcher.plan())
    child = make_sequence(0, list(range(6)))
    child.index = 1
    child.tokens.append(99)
    batcher.kv.fork(parent, child)
    batcher.start_forked(child)
    parent.computed = child.computed = 6
    batcher.check_integrity()
    (ours,), (theirs,) = parent.blocks, child.blocks
    shared = ours.ids[1]
    plan = batcher.plan()
    assert ours.ids[0] == theirs.ids[0]
    assert ours.ids[1] != theirs.ids[1]
    assert plan.copies == ((shared, ours.ids[1]),)
    assert theirs.ids[1] == shared
    run(batcher, plan)
    batcher.check_integrity()


class BatcherMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, forks and steps; after each the accounts hold, and in the end all finish."""

    groups = PLAIN

    def __init__(self) -> None:
        super().__init__()
        self.batcher = make_batcher(blocks=12 * len(self.groups), seqs=4, budget=10, groups=self.groups)
        self.arrivals = 0
        self.seqs: list[Sequence] = []

    @property
    def alive(self) -> list[Sequence]:
        return [seq for seq in self.seqs if seq.state is not State.FINISHED]

    @rule(
        length=st.integers(1, 30),
        base=st.integers(0, 2),
        output=st.integers(1, 18),
        priority=st.integers(0, 1),
    )
    def arrive(self, length: int, base: int, output: int, priority: int) -> None:
        prompt = [base * 100 + i for i in range(length)]
        seq = make_sequence(self.arrivals, prompt, output=output, priority=priority)
        self.arrivals += 1
        self.seqs.append(seq)
        self.batcher.add(seq)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.batcher.remove(data.draw(st.sampled_from(self.alive)))

    @precondition(lambda self: self.batcher.has_room and self.batcher.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.batcher.running))
        child = make_sequence(self.arrivals, parent.request.prompt, output=parent.request.max_tokens)
        self.arrivals += 1
        child.tokens = list(parent.tokens)
        self.batcher.kv.fork(parent, child)
        self.batcher.start_forked(child)
        self.seqs.append(child)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            plan = self.batcher.plan()
            assert plan.chunks or not self.alive
            targets = [target for _, target in plan.copies]
            assert len(set(targets)) == len(targets)
            owned = {block for chunk in plan.chunks for own in chunk.seq.blocks for block in own.ids}
            assert set(targets) <= owned
            writers = [
                own.ids[i]
                for chunk in plan.chunks
                for own in chunk.seq.blocks
                for i in range(chunk.start // BLOCK, -(-(chunk.start + chunk.count) // BLOCK))
            ]
            assert len(set(writers)) == len(writers), "two sequences write into one block"
            run(self.batcher, plan)

    @invariant()
    def accounts_add_up(self) -> None:
        self.batcher.check_integrity()

    def teardown(self) -> None:
        finish(self.batcher)
        pool = self.batcher.kv.pool
        assert pool.available == pool.total
        assert not self.alive


BatcherMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBatcherMachine = BatcherMachine.TestCase


class HybridMachine(BatcherMachine):
    """Layers that see everything, and two kinds of windows, which share their blocks."""

    groups = KvGroups.of([FULL, WindowRule(6), WindowRule(11, sinks=3)])


HybridMachine.TestCase.settings = BatcherMachine.TestCase.settings
TestHybridMachine = HybridMachine.TestCase

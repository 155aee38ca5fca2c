"""The flat batch against one built token by token; padding; block tables through the lives of sequences."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decodefleet.worker.batcher import Batcher, Chunk
from decodefleet.worker.config import BatchConfig
from decodefleet.worker.kv.block_pool import BlockPool
from decodefleet.worker.kv.groups import FULL, PLAIN, KvGroups, WindowRule
from decodefleet.worker.kv.hashing import extend_chain
from decodefleet.worker.kv.manager import KvManager
from decodefleet.worker.runner.batch import (
    BatchArrays,
    as_input,
    empty_batch,
    lay_out,
    leading_decodes,
    pad_decode,
)
from decodefleet.worker.runner.block_tables import BlockTables
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.sequence import BlockList, Request, Sequence, State

BLOCK = 4


def make_sequence(tokens: list[int], *blocks: list[int], order: int = 0, output: int = 9) -> Sequence:
    request = Request(str(order), 0, SamplingParams(), tokens, b"r", output, frozenset(), (0, order))
    hashes = extend_chain(b"r", tokens, BLOCK)
    return Sequence(
        request, 0, 0, list(tokens), hashes, state=State.RUNNING, blocks=[BlockList(ids) for ids in blocks]
    )


def tokens(batch: BatchArrays) -> list[int]:
    return batch.ids_NT[0].tolist()


def positions(batch: BatchArrays) -> list[int]:
    return batch.ids_NT[1].tolist()


def slots(batch: BatchArrays, group: int = 0) -> list[int]:
    return batch.ids_NT[group - len(batch.tables)].tolist()


def test_a_mixed_batch() -> None:
    decode = make_sequence([10, 11, 12, 13, 14], [7, 2])
    prompt = make_sequence([20, 21, 22, 23, 24, 25, 26], [5, 3])
    chunks = (Chunk(decode, 4, 1, samples=True), Chunk(prompt, 2, 4, samples=False))
    batch, feed = lay_out(chunks, BlockTables(2, [4], BLOCK), BLOCK, {})
    assert tokens(batch) == [14, 22, 23, 24, 25]
    assert positions(batch) == [4, 2, 3, 4, 5]
    assert slots(batch) == [8, 22, 23, 12, 13]
    assert batch.query_start_B1.tolist() == [0, 1, 5]
    assert batch.context_FB[0].tolist() == [5, 6]
    assert batch.tables[0].tolist() == [[7, 2], [5, 3]]
    assert feed.shape == (2, 0)
    assert leading_decodes(chunks) == 1
    assert leading_decodes(chunks[::-1]) == 0
    assert [array.dtype for array in batch.arrays] == [np.int64] + [np.int32] * 3


def test_each_group_has_slots_and_a_table_of_its_own() -> None:
    seq = make_sequence(list(range(6)), [3, 1], [9, 7])
    chunk = Chunk(seq, 5, 1, samples=True)
    groups = KvGroups.of([FULL, WindowRule(6)])
    batch, _ = lay_out((chunk,), BlockTables(1, [4, 3], BLOCK, groups), BLOCK, {})
    assert (slots(batch), slots(batch, group=1)) == ([5], [29])
    assert [table.tolist() for table in batch.tables] == [[[3, 1]], [[9, 7]]]
    padded = pad_decode(batch, 3, [4, 2], scratch=5, block_size=BLOCK)
    assert slots(padded, group=1) == [29, 20, 20]
    assert padded.tables[0].tolist() == [[3, 1, 5, 5], [5, 5, 5, 5], [5, 5, 5, 5]]
    assert padded.tables[1].tolist() == [[9, 7], [5, 5], [5, 5]]
    assert padded.context_FB.tolist() == [[6, 1, 1]] * 2


def test_a_frame_leaves_out_what_was_dropped() -> None:
    seq = make_sequence(list(range(24)), [3, 1, 4, 5, 6, 2])
    seq.blocks.append(BlockList([9, 7, 8], slid=3, dropped=3))
    chunk, groups = Chunk(seq, 21, 3, samples=True), KvGroups.of([FULL, WindowRule(6)])
    batch, _ = lay_out((chunk,), BlockTables(1, [6, 3], BLOCK, groups), BLOCK, {})
    assert batch.ids_NT[1:3].tolist() == [[21, 22, 23], [9, 10, 11]]
    assert batch.context_FB.tolist() == [[24], [12]]
    assert batch.max_context == (24, 12)
    assert (slots(batch), slots(batch, group=1)) == ([9, 10, 11], [33, 34, 35])
    assert batch.tables[1].tolist() == [[9, 7, 8]]
    inputs = as_input(
        [torch.from_numpy(array) for array in batch.arrays],
        groups,
        max_query=3,
        max_context=batch.max_context,
        decodes=0,
    )
    assert inputs.positions_T.tolist() == [21, 22, 23]
    assert [meta.positions_T.tolist() for meta in inputs.metas] == [[21, 22, 23], [9, 10, 11]]
    assert [(meta.context_B.tolist(), meta.max_context) for meta in inputs.metas] == [([24], 24), ([12], 12)]


def test_tokens_in_flight_are_fed_from_the_samples_of_the_step_before() -> None:
    known, flying = make_sequence([1, 2], [0]), make_sequence([3, 4, 5], [1])
    flying.pending = 1
    longer = make_sequence([6, 7], [2])
    longer.pending = 1
    chunks = (
        Chunk(known, 1, 1, samples=True),
        Chunk(flying, 3, 1, samples=True),
        Chunk(longer, 0, 3, samples=True),
    )
    batch, feed = lay_out(chunks, BlockTables(3, [4], BLOCK), BLOCK, {flying: 5, longer: 0})
    assert tokens(batch) == [2, 0, 6, 7, 0]
    assert feed.tolist() == [[1, 4], [5, 0]]


def test_padding_adds_rows_that_write_to_the_scratch_block() -> None:
    seqs = [make_sequence(list(range(6)), [3, 1]), make_sequence(list(range(3)), [2])]
    chunks = tuple(Chunk(seq, len(seq.tokens) - 1, 1, samples=True) for seq in seqs)
    batch, _ = lay_out(chunks, BlockTables(2, [4], BLOCK), BLOCK, {})
    padded = pad_decode(batch, 4, [3], scratch=9, block_size=BLOCK)
    assert tokens(padded) == [5, 2, 0, 0]
    assert positions(padded) == [5, 2, 0, 0]
    assert slots(padded) == [5, 10, 36, 36]
    assert padded.query_start_B1.tolist() == [0, 1, 2, 3, 4]
    assert padded.context_FB[0].tolist() == [6, 3, 1, 1]
    assert padded.tables[0].tolist()[0] == [3, 1, 9]
    assert padded.tables[0].tolist()[2:] == [[9, 9, 9], [9, 9, 9]]
    assert [a.dtype for a in padded.arrays] == [a.dtype for a in batch.arrays]


def test_a_bucket_of_padding_only() -> None:
    padded = pad_decode(empty_batch(PLAIN), 3, [2], scratch=7, block_size=BLOCK)
    assert slots(padded) == [28, 28, 28]
    assert padded.context_FB[0].tolist() == [1, 1, 1]
    assert padded.tables[0].tolist() == [[7, 7]] * 3


def check(batch: BatchArrays, chunks: tuple[Chunk, ...], groups: KvGroups) -> None:
    """Token by token, from the sequences' own lists; of blocks that slid out of a window any id will do."""
    ids = batch.ids_NT.T.tolist()
    for b, chunk in enumerate(chunks):
        seq, end = chunk.seq, chunk.start + chunk.count
        first, last = batch.query_start_B1[b : b + 2]
        used = -(-end // BLOCK)
        for group, own, table_BM in zip(groups.groups, seq.blocks, batch.tables, strict=True):
            sinks = range(min(-(-group.rule.sinks // BLOCK), used))
            seen = [*sinks, *(i - own.dropped for i in range(max(own.slid, len(sinks)), used))]
            assert table_BM[b, seen].tolist() == [own.ids[i] for i in seen]
        dropped = [seq.blocks[group].dropped * BLOCK for group in groups.windowed]
        assert batch.context_FB[:, b].tolist() == [end, *(end - tokens for tokens in dropped)]
        assert ids[first:last] == [
            [
                *(seq.tokens[p], p, *(p - tokens for tokens in dropped)),
                *(own.ids[p // BLOCK - own.dropped] * BLOCK + p % BLOCK for own in seq.blocks),
            ]
            for p in range(chunk.start, end)
        ]
    assert batch.query_start_B1[-1] == len(ids)


PATTERNS = [[FULL], [FULL, WindowRule(6)], [WindowRule(9)], [WindowRule(1), WindowRule(13), WindowRule(7, 2)]]


@pytest.fixture
def often_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are dropped every two blocks."""
    monkeypatch.setattr("decodefleet.worker.kv.groups.DROPPED_TOKENS", 2 * BLOCK)


@pytest.mark.usefixtures("often_dropped")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), blocks=st.integers(10, 20), rules=st.sampled_from(PATTERNS))
def test_tables_follow_growth_preemption_copies_and_reuse(
    seed: int, blocks: int, rules: list[WindowRule]
) -> None:
    """Real plans of the real batcher in little memory, with prefixes shared and sequences forked."""
    rng = random.Random(seed)
    groups = KvGroups.of(rules)
    pool = BlockPool(blocks * len(groups))
    config = BatchConfig(max_num_seqs=3, max_num_batched_tokens=9)
    kv = KvManager(pool, BLOCK, groups, prefix_caching=True, max_chunk=9)
    batcher = Batcher(config, kv)
    tables = BlockTables(3, groups.most_entries(100, BLOCK, chunk=9), BLOCK, groups)
    for order in range(8):
        base = rng.choice([100, 200])
        prompt = [base + i for i in range(rng.randint(1, 24))]
        seq = make_sequence(prompt, order=order, output=rng.randint(1, 16))
        seq.state = State.WAITING
        batcher.add(seq)
    while batcher.running or batcher.waiting:
        plan = batcher.plan()
        batch, _ = lay_out(plan.chunks, tables, BLOCK, {})
        check(batch, plan.chunks, groups)
        for chunk in plan.chunks:
            seq = chunk.seq
            seq.computed += chunk.count
            batcher.kv.commit(seq)
            if chunk.samples:
                longest = seq.request.max_tokens
                if batcher.has_room and seq.output_tokens + 1 < longest and rng.random() < 0.2:
                    order = 100 + rng.randrange(10**6)
                    child = make_sequence(seq.request.prompt, order=order, output=longest)
                    child.tokens = [*seq.tokens, 1]
                    batcher.kv.fork(seq, child)
                    batcher.start_forked(child)
                seq.tokens.append(rng.randrange(5))
                if seq.output_tokens >= seq.request.max_tokens:
                    batcher.remove(seq)
    assert pool.available == pool.total


def test_a_sequence_that_comes_back_to_other_blocks_is_written_anew() -> None:
    tables = BlockTables(1, [4], BLOCK)
    seq = make_sequence(list(range(9)), [4, 5, 6])
    assert tables.gather((Chunk(seq, 8, 1, samples=True),), [3])[0].tolist() == [[4, 5, 6]]
    seq.blocks = [BlockList([1, 2, 3])]
    assert tables.gather((Chunk(seq, 8, 1, samples=True),), [3])[0].tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("state", [State.FINISHED, State.WAITING])
def test_rows_of_those_who_do_not_run_are_taken(state: State) -> None:
    tables = BlockTables(1, [4], BLOCK)
    first, second = make_sequence([1], [3]), make_sequence([1], [2])
    assert tables.gather((Chunk(first, 0, 1, samples=True),), [1])[0].tolist() == [[3]]
    first.state = state
    assert tables.gather((Chunk(second, 0, 1, samples=True),), [1])[0].tolist() == [[2]]

"""The flat batch against one built token by token; padding; block tables through the lives of sequences."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodefleet.worker.batcher import Batcher, Chunk
from decodefleet.worker.config import BatchConfig
from decodefleet.worker.kv.block_pool import BlockPool
from decodefleet.worker.kv.groups import FULL, KvGroups, WindowRule
from decodefleet.worker.kv.hashing import extend_chain
from decodefleet.worker.kv.manager import KvManager
from decodefleet.worker.runner.batch import (
    BatchArrays,
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
    return batch.ids_NT[2 + group].tolist()


def test_a_mixed_batch() -> None:
    decode = make_sequence([10, 11, 12, 13, 14], [7, 2])
    prompt = make_sequence([20, 21, 22, 23, 24, 25, 26], [5, 3])
    chunks = (Chunk(decode, 4, 1, samples=True), Chunk(prompt, 2, 4, samples=False))
    batch, feed = lay_out(chunks, BlockTables(2, 4, BLOCK), BLOCK, {})
    assert tokens(batch) == [14, 22, 23, 24, 25]
    assert positions(batch) == [4, 2, 3, 4, 5]
    assert slots(batch) == [8, 22, 23, 12, 13]
    assert batch.query_start_B1.tolist() == [0, 1, 5]
    assert batch.context_B.tolist() == [5, 6]
    assert batch.tables_GBM[0].tolist() == [[7, 2], [5, 3]]
    assert feed.shape == (2, 0)
    assert leading_decodes(chunks) == 1
    assert leading_decodes(chunks[::-1]) == 0
    assert [array.dtype for array in batch] == [np.int64] + [np.int32] * 3


def test_each_group_has_slots_and_a_table_of_its_own() -> None:
    seq = make_sequence(list(range(6)), [3, 1], [9, 7])
    chunk = Chunk(seq, 5, 1, samples=True)
    batch, _ = lay_out((chunk,), BlockTables(1, 4, BLOCK, groups=2), BLOCK, {})
    assert (slots(batch), slots(batch, group=1)) == ([5], [29])
    assert batch.tables_GBM.tolist() == [[[3, 1]], [[9, 7]]]
    padded = pad_decode(batch, 3, 2, scratch=5, block_size=BLOCK)
    assert slots(padded, group=1) == [29, 20, 20]
    assert padded.tables_GBM.tolist() == [[[3, 1], [5, 5], [5, 5]], [[9, 7], [5, 5], [5, 5]]]


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
    batch, feed = lay_out(chunks, BlockTables(3, 4, BLOCK), BLOCK, {flying: 5, longer: 0})
    assert tokens(batch) == [2, 0, 6, 7, 0]
    assert feed.tolist() == [[1, 4], [5, 0]]


def test_padding_adds_rows_that_write_to_the_scratch_block() -> None:
    seqs = [make_sequence(list(range(6)), [3, 1]), make_sequence(list(range(3)), [2])]
    chunks = tuple(Chunk(seq, len(seq.tokens) - 1, 1, samples=True) for seq in seqs)
    batch, _ = lay_out(chunks, BlockTables(2, 4, BLOCK), BLOCK, {})
    padded = pad_decode(batch, 4, 3, scratch=9, block_size=BLOCK)
    assert tokens(padded) == [5, 2, 0, 0]
    assert positions(padded) == [5, 2, 0, 0]
    assert slots(padded) == [5, 10, 36, 36]
    assert padded.query_start_B1.tolist() == [0, 1, 2, 3, 4]
    assert padded.context_B.tolist() == [6, 3, 1, 1]
    assert padded.tables_GBM[0].tolist()[0] == [3, 1, 9]
    assert padded.tables_GBM[0].tolist()[2:] == [[9, 9, 9], [9, 9, 9]]
    assert [a.dtype for a in padded] == [a.dtype for a in batch]


def test_a_bucket_of_padding_only() -> None:
    padded = pad_decode(empty_batch(1), 3, 2, scratch=7, block_size=BLOCK)
    assert slots(padded) == [28, 28, 28]
    assert padded.context_B.tolist() == [1, 1, 1]
    assert padded.tables_GBM[0].tolist() == [[7, 7]] * 3


def check(batch: BatchArrays, chunks: tuple[Chunk, ...], groups: KvGroups) -> None:
    """Token by token, from the sequences' own lists; of blocks that slid out of a window any id will do."""
    ids = batch.ids_NT.T.tolist()
    for b, chunk in enumerate(chunks):
        seq, end = chunk.seq, chunk.start + chunk.count
        first, last = batch.query_start_B1[b : b + 2]
        used = -(-end // BLOCK)
        for group, own, table_BM in zip(groups.groups, seq.blocks, batch.tables_GBM, strict=True):
            seen = [*range(min(-(-group.rule.sinks // BLOCK), used)), *range(own.slid, used)]
            assert table_BM[b, seen].tolist() == [own.ids[i] for i in seen]
        assert ids[first:last] == [
            [seq.tokens[p], p, *(own.ids[p // BLOCK] * BLOCK + p % BLOCK for own in seq.blocks)]
            for p in range(chunk.start, end)
        ]
    assert batch.query_start_B1[-1] == len(ids)


PATTERNS = [[FULL], [FULL, WindowRule(6)], [WindowRule(9)], [WindowRule(1), WindowRule(13), WindowRule(7, 2)]]


@settings(max_examples=100, deadline=None)
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
    tables = BlockTables(3, blocks, BLOCK, len(groups))
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
    tables = BlockTables(1, 4, BLOCK)
    seq = make_sequence(list(range(9)), [4, 5, 6])
    assert tables.gather((Chunk(seq, 8, 1, samples=True),), 3).tolist() == [[[4, 5, 6]]]
    seq.blocks = [BlockList([1, 2, 3])]
    assert tables.gather((Chunk(seq, 8, 1, samples=True),), 3).tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize("state", [State.FINISHED, State.WAITING])
def test_rows_of_those_who_do_not_run_are_taken(state: State) -> None:
    tables = BlockTables(1, 4, BLOCK)
    first, second = make_sequence([1], [3]), make_sequence([1], [2])
    assert tables.gather((Chunk(first, 0, 1, samples=True),), 1).tolist() == [[[3]]]
    first.state = state
    assert tables.gather((Chunk(second, 0, 1, samples=True),), 1).tolist() == [[[2]]]

"""KV groups in the manager: what slides out comes back, and what a hybrid prefix needs."""

from __future__ import annotations

import pytest
from engines import RecordingSink

from decodefleet.worker.kv.block_pool import BlockPool
from decodefleet.worker.kv.groups import FULL, KvGroups, WindowRule
from decodefleet.worker.kv.hashing import extend_chain, group_hash
from decodefleet.worker.kv.manager import KvManager
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.sequence import Request, Sequence

BLOCK = 4
HYBRID = KvGroups.of([FULL, WindowRule(6)])
TOKENS = list(range(100, 140))


def make_manager(
    groups: KvGroups = HYBRID, blocks: int = 64, sink: RecordingSink | None = None, chunk: int = 40
) -> KvManager:
    return KvManager(BlockPool(blocks, sink), BLOCK, groups, prefix_caching=True, max_chunk=chunk)


def make_sequence(tokens: list[int]) -> Sequence:
    request = Request("r", 0, SamplingParams(), tokens, b"root", 99, frozenset(), (0, 0))
    return Sequence(request, 0, 0, list(tokens), extend_chain(b"root", tokens, BLOCK))


def start(kv: KvManager, tokens: list[int]) -> Sequence:
    seq = make_sequence(tokens)
    kv.attach(seq, kv.match(seq))
    return seq


def advance(kv: KvManager, seq: Sequence, count: int) -> None:
    assert kv.grow(seq, count)
    seq.computed += count
    kv.commit(seq)
    kv.check_integrity([seq])


def held(kv: KvManager, seq: Sequence) -> list[list[int]]:
    """Numbers of the blocks that each group holds."""
    return [[i for i, block in enumerate(own.ids) if block != kv.pool.scratch] for own in seq.blocks]


def test_blocks_that_slid_out_of_the_window_come_back_and_can_be_found() -> None:
    kv = make_manager()
    seq = start(kv, TOKENS)
    advance(kv, seq, 20)
    # a token's window begins five before it, so those of 20 to 23 begin at 15 at the earliest
    advance(kv, seq, 4)
    assert held(kv, seq) == [[0, 1, 2, 3, 4, 5], [3, 4, 5]]
    assert kv.pool.cached == 3
    assert all(kv.pool.find(group_hash(seq.hashes[i], g)) is not None for i in range(6) for g in range(2))
    kv.release(seq)
    kv.check_integrity([])
    assert kv.pool.available == kv.pool.total


def test_a_window_needs_constant_memory() -> None:
    groups = KvGroups.of([WindowRule(6)])
    kv = make_manager(groups, blocks=groups.most_blocks(1000, BLOCK, chunk=3), chunk=3)
    seq = start(kv, list(range(1000)))
    while seq.remaining:
        advance(kv, seq, min(3, seq.remaining))


def test_sinks_stay() -> None:
    kv = make_manager(KvGroups.of([WindowRule(6, sinks=5)]))
    seq = start(kv, TOKENS)
    for _ in range(8):
        advance(kv, seq, 4)
    assert held(kv, seq) == [[0, 1, 5, 6, 7]]


def cached(kv: KvManager, tokens: list[int]) -> Sequence:
    """A sequence that was computed, one block at a time, and left."""
    seq = start(kv, tokens)
    while seq.remaining:
        advance(kv, seq, min(BLOCK, seq.remaining))
    kv.release(seq)
    return seq


def forget(kv: KvManager, name: bytes) -> None:
    """As if the block had been evicted."""
    block = kv.pool.find(name)
    assert block is not None
    kv.pool._forget([block])
    kv.pool._cached.reuse([block])
    kv.pool._free.append(block)


def test_a_prefix_needs_all_blocks_of_the_full_group_and_the_last_of_the_window() -> None:
    kv = make_manager()
    first = cached(kv, TOKENS)
    for i in range(7):
        forget(kv, group_hash(first.hashes[i], 1))
    second = start(kv, TOKENS)
    assert second.computed == 36
    assert held(kv, second) == [[*range(9)], [7, 8]]
    kv.check_integrity([second])


@pytest.mark.parametrize(
    ("gone", "computed"),
    [
        # group, block; the window of a prefix of n blocks is blocks n - 2 and n - 1
        ([(1, 7)], 28),
        ([(1, 8)], 32),
        ([(1, 7), (1, 5)], 20),
        ([(0, 4)], 16),
        ([(0, 4), (1, 3)], 12),
        ([(1, i) for i in range(1, 9, 2)], 4),
        ([(1, 0), *((1, i) for i in range(1, 9, 2))], 0),
        ([(0, 0)], 0),
    ],
)
def test_a_shorter_prefix_is_found_where_a_block_is_gone(gone: list[tuple[int, int]], computed: int) -> None:
    kv = make_manager()
    first = cached(kv, TOKENS)
    for group, i in gone:
        forget(kv, group_hash(first.hashes[i], group))
    second = start(kv, TOKENS)
    assert second.computed == computed
    kv.check_integrity([second])


def test_windows_of_unlike_groups_have_to_agree() -> None:
    """Each group alone would take a longer prefix than both together."""
    kv = make_manager(KvGroups.of([WindowRule(6), WindowRule(14)]), blocks=128)
    first = cached(kv, TOKENS)
    forget(kv, group_hash(first.hashes[7], 0))
    forget(kv, group_hash(first.hashes[6], 1))
    assert start(kv, TOKENS).computed == 24


def test_a_prefix_with_sinks_needs_them() -> None:
    kv = make_manager(KvGroups.of([WindowRule(6, sinks=5)]))
    first = cached(kv, TOKENS)
    for i in range(2, 7):
        forget(kv, first.hashes[i])
    second = start(kv, TOKENS)
    assert (second.computed, held(kv, second)) == (36, [[0, 1, 7, 8]])
    kv.release(second)
    forget(kv, first.hashes[1])
    assert start(kv, TOKENS).computed == 4


def test_the_sink_hears_of_group_0() -> None:
    sink = RecordingSink()
    kv = make_manager(sink=sink)
    seq = cached(kv, TOKENS)
    assert sink.held == set(seq.hashes)
    assert kv.pool.clear_cache() == 20
    assert sink.held == set()


def test_eviction_of_silent_blocks_is_silent() -> None:
    sink = RecordingSink()
    kv = make_manager(blocks=20, sink=sink)
    cached(kv, TOKENS)
    blocks = kv.pool.allocate(20)
    assert blocks is not None
    assert kv.pool.evictions == 20
    assert sink.held == set()


def test_a_fork_shares_in_all_groups_and_copies_in_all() -> None:
    kv = make_manager()
    parent = start(kv, TOKENS[:18])
    advance(kv, parent, 18)
    child = make_sequence(TOKENS[:18])
    kv.fork(parent, child)
    parent.tokens.append(1)
    assert kv.grow(parent, 1)
    copies = kv.take_copies()
    assert len(copies) == 2
    assert [
        (own.ids[4], other.ids[4]) for own, other in zip(child.blocks, parent.blocks, strict=True)
    ] == copies
    kv.check_integrity([parent, child])
    # what slides out of the parent's window is still the child's
    parent.computed += 1
    for token in range(8):
        parent.tokens.append(token)
        assert kv.grow(parent, 1)
        parent.computed += 1
        kv.check_integrity([parent, child])
    kv.release(parent)
    kv.release(child)
    kv.check_integrity([])


def test_admission_counts_what_a_window_can_hold() -> None:
    """Forty tokens need ten blocks in the full group, and in the sliding one five while in chunks of 8."""
    for blocks, admitted in ((15, True), (14, False)):
        kv = make_manager(blocks=blocks, chunk=8)
        seq = make_sequence(TOKENS)
        assert kv.can_admit(seq, kv.match(seq), reserve=0) is admitted
    kv = make_manager(blocks=19, chunk=8)
    assert kv.can_admit(seq, kv.match(seq), reserve=2)
    assert not kv.can_admit(seq, kv.match(seq), reserve=3)

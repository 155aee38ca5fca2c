"""The index against a plain model of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodefleet.cluster.scheduling import prefix_index
from decodefleet.cluster.scheduling.chain import Chain
from decodefleet.cluster.scheduling.prefix_index import PrefixIndex
from decodefleet.cluster.scheduling.view import Hit, WorkerKey

A, B, C = (WorkerKey(worker_id, "one") for worker_id in "abc")


def blocks_of(hits) -> dict[WorkerKey, int]:
    return {worker: hit.blocks for worker, hit in hits.items()}


def test_leading_blocks_per_worker(make):
    index, chain = PrefixIndex(), make.hashes(10)
    index.stored(A, chain[:7])
    index.stored(B, chain[:3])
    # a hole: what lies behind it is of no use
    index.stored(C, chain[1:])
    assert index.hits(Chain.of(chain)) == {A: Hit(7, 7, 7), B: Hit(3, 3, 3)}
    assert index.hits(Chain.of(make.hashes(10, seed=1))) == {}
    assert index.hits(Chain.of([])) == {}
    index.removed(A, chain[4:5])
    assert blocks_of(index.hits(Chain.of(chain))) == {A: 4, B: 3}
    index.check_integrity()


def test_search_ends_soon_after_the_first_block_nobody_holds(make, monkeypatch):
    index, chain = PrefixIndex(), make.hashes(1000)
    index.stored(A, chain[:100])
    asked = []
    block = Chain.block
    monkeypatch.setattr(Chain, "block", lambda self, at: asked.append(at) or block(self, at))
    assert blocks_of(index.hits(Chain.of(chain))) == {A: 100}
    assert asked
    assert len(asked) <= 4
    assert max(asked) < 112


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(1, 1500), max_size=12), st.integers(1, 1500))
def test_depths_are_exact_without_holes(make, depths, length):
    """Wherever holders drop out, near each other or far apart, at marks, before and behind them."""
    index, chain = PrefixIndex(), make.hashes(1500)
    for depth in depths:
        index.stored(WorkerKey(f"w{depth}", "one"), chain[:depth])
    expected = {WorkerKey(f"w{depth}", "one"): min(depth, length) for depth in depths}
    assert blocks_of(index.hits(Chain.of(chain[:length]))) == expected


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 900), st.integers(4, 99))
def test_holes_of_more_than_an_eighth_are_seen(make, start, size):
    index, chain = PrefixIndex(), make.hashes(1100)
    index.stored(A, chain)
    index.stored(B, chain)
    size = max(size, start // 8 + 4)
    index.removed(A, chain[start : start + size])
    found = blocks_of(index.hits(Chain.of(chain)))
    assert found[B] == 1100
    assert found.get(A, 0) == start


def test_tiers_add_up(make):
    index, chain = PrefixIndex(), make.hashes(10)
    index.stored(A, chain[:2])
    index.stored(A, chain[1:5], "cpu")
    index.stored(A, chain[5:6], "nvme")
    index.stored(B, chain[:1], "nvme")
    assert index.hits(Chain.of(chain)) == {A: Hit(6, 2, 5), B: Hit(1, 0, 0)}
    index.removed(A, chain[:2])
    assert index.hits(Chain.of(chain)) == {B: Hit(1, 0, 0)}
    index.removed(A, chain, "cpu")
    index.check_integrity()


def test_dispatched_chains_count_until_two_turns_later(make):
    index, chain = PrefixIndex(), make.hashes(40)
    index.tick(0.0, 2.0)
    index.dispatched(A, Chain.of(chain).marks)
    assert index.hits(Chain.of(chain)) == {A: Hit(40, 40, 40)}
    assert not index.tick(1.0, 2.0)
    assert index.tick(2.0, 2.0)
    assert blocks_of(index.hits(Chain.of(chain))) == {A: 40}
    assert index.tick(4.0, 2.0)
    assert index.hits(Chain.of(chain)) == {}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 32, 33, 100, 1000, 3000])
@pytest.mark.parametrize("other", [1, 4, 32, 500])
def test_a_dispatched_chain_is_found_by_others_that_share_it(make, length, other):
    index, chain = PrefixIndex(), make.hashes(length)
    index.dispatched(A, Chain.of(chain).marks)
    found = blocks_of(index.hits(Chain.of([*chain, *make.hashes(other, seed=1)]))).get(A, 0)
    assert length - max(3, length // 8) <= found <= length
    assert blocks_of(index.hits(Chain.of(chain))) == {A: length}


def test_confirmation_and_dispatch_take_the_longer(make):
    index, chain = PrefixIndex(), make.hashes(40)
    index.stored(A, chain[:20])
    index.dispatched(A, Chain.of(chain[:8]).marks)
    index.dispatched(B, Chain.of(chain[:8]).marks)
    assert blocks_of(index.hits(Chain.of(chain))) == {A: 20, B: 8}


def test_memory_is_bounded(make):
    index = PrefixIndex(max_blocks=640)
    for seed in range(100):
        index.stored(A if seed % 2 else B, make.hashes(100, seed))
        index.dispatched(C, Chain.of(make.hashes(100, seed)).marks)
        index.check_integrity()
        assert len(index) <= 640
    assert len(index._recent) <= 640
    # the newest are kept
    assert blocks_of(index.hits(Chain.of(make.hashes(100, 99)))) == {A: 100, C: 100}


def test_dropped_chains_are_freed_a_piece_at_a_time(make, monkeypatch):
    monkeypatch.setattr(prefix_index, "_SWEEP", 5)
    index = PrefixIndex()
    index.dispatched(A, Chain.of(make.hashes(40)).marks)
    for now in (0.0, 2.0):
        index.tick(now, 2.0)
    assert len(index._recent) == 0
    assert sum(map(len, index._recent._dropped)) == 5
    index.tick(2.1, 2.0)
    assert index._recent._dropped == []


def test_a_bit_is_reused_only_when_swept(make, monkeypatch):
    monkeypatch.setattr(prefix_index, "_SWEEP", 50)
    index, chain = PrefixIndex(), make.hashes(120)
    index.stored(A, chain)
    index.dispatched(A, Chain.of(chain).marks)
    index.clear(A)
    assert index.hits(Chain.of(chain)) == {}
    for worker in (B, C):
        index.stored(worker, chain[:1])
        assert blocks_of(index.hits(Chain.of(chain)))[worker] == 1
        index.tick(0.0, 2.0)
        index.check_integrity()
    index.tick(0.0, 2.0)
    index.check_integrity()
    assert not index._slots.retired
    again = WorkerKey("d", "one")
    index.stored(again, chain[:2])
    assert index._slots.find(again) == 0
    assert blocks_of(index.hits(Chain.of(chain))) == {B: 1, C: 1, again: 2}


def test_clear_of_a_stranger_does_nothing():
    index = PrefixIndex()
    index.clear(A)
    index.removed(A, [bytes(16)])
    index.check_integrity()


BLOCKS = [bytes([number]) * 16 for number in range(12)]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "clear", "tick"]),
        st.sampled_from([A, B, C]),
        st.sets(st.sampled_from(BLOCKS)),
        st.sampled_from(["gpu", "cpu"]),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_equals_the_plain_model(operations):
    index = PrefixIndex()
    held: dict[tuple[WorkerKey, str], set[bytes]] = {}
    for now, (operation, worker, blocks, tier) in enumerate(operations):
        if operation == "stored":
            index.stored(worker, blocks, tier)
            held.setdefault((worker, tier), set()).update(blocks)
        elif operation == "removed":
            index.removed(worker, blocks, tier)
            held.setdefault((worker, tier), set()).difference_update(blocks)
        elif operation == "clear":
            index.clear(worker)
            held = {key: value for key, value in held.items() if key[0] != worker}
        else:
            index.tick(float(now), 2.0)
        index.check_integrity()

    def leading(*sets: set[bytes]) -> int:
        union = set().union(*sets)
        return next((i for i, block in enumerate(BLOCKS) if block not in union), len(BLOCKS))

    expected = {}
    for worker in (A, B, C):
        gpu, cpu = (held.get((worker, tier), set()) for tier in ("gpu", "cpu"))
        if leading(gpu, cpu):
            expected[worker] = Hit(leading(gpu, cpu), leading(gpu), leading(gpu, cpu))
    assert index.hits(Chain.of(BLOCKS)) == expected

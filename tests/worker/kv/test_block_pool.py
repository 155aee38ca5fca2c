from __future__ import annotations

import pytest
from engines import RecordingSink
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decodefleet.worker.config import EvictionPolicyName
from decodefleet.worker.kv.block_pool import BlockPool
from decodefleet.worker.kv.eviction import make_policy


def name(i: int) -> bytes:
    return i.to_bytes(16, "little")


def test_free_blocks_go_first_then_the_oldest_cached() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    pool.commit(first[0], name(1))
    pool.commit(second[0], name(2))
    pool.release(second)
    pool.release(first)
    assert pool.allocate(2) == [2, 3]
    assert pool.allocate(1) == second
    assert pool.find(name(2)) is None
    assert pool.find(name(1)) == first[0]


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for i, block in enumerate(blocks):
        pool.commit(block, name(i))
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.find(name(0)) == blocks[0]


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(2)
    assert pool.allocate(3) is None
    assert pool.available == 2
    assert pool.allocate(2) is not None


def test_a_shared_block_survives_its_first_owner() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.commit(blocks[0], name(1))
    pool.share(blocks)
    pool.release(blocks)
    assert pool.allocate(1) is None
    pool.release(blocks)
    assert pool.allocate(1) == blocks


def test_a_second_copy_of_a_content_stays_anonymous() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.commit(blocks[0], name(1))
    pool.commit(blocks[1], name(1))
    assert pool.find(name(1)) == blocks[0]
    pool.release(blocks)
    assert (pool.free, pool.cached) == (1, 1)


def test_integrity_check_notices_what_is_wrong() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool._free.append(blocks[0])
    with pytest.raises(AssertionError):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Random owners of random blocks; the model is who holds what, and which names may be found."""

    eviction: EvictionPolicyName = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.sink = RecordingSink()
        self.pool = BlockPool(7, self.sink, make_policy(self.eviction, 7, doubling=2.0))
        self.held: list[int] = []
        self.names: dict[bytes, int] = {}

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        available = self.pool.available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > available)
        for block in blocks or []:
            assert block not in self.held
            self.names = {key: other for key, other in self.names.items() if other != block}
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.release([block])
        self.held.remove(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), content=st.integers(0, 12))
    def commit(self, data: st.DataObject, content: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        if block not in self.names.values() and name(content) not in self.names:
            self.names[name(content)] = block
        self.pool.commit(block, name(content))

    @rule(content=st.integers(0, 12))
    def share(self, content: int) -> None:
        block = self.pool.find(name(content))
        assert block == self.names.get(name(content))
        if block is not None:
            self.pool.share([block])
            self.held.append(block)

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()
        self.names = {key: block for key, block in self.names.items() if block in self.held}

    @invariant()
    def accounts_add_up(self) -> None:
        self.pool.check_integrity()
        assert self.sink.held == set(self.names)
        assert self.pool.available == self.pool.total - len(set(self.held))


class CostPoolMachine(PoolMachine):
    eviction: EvictionPolicyName = "cost"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestPoolByCost = CostPoolMachine.TestCase
TestPoolByCost.settings = TestPool.settings

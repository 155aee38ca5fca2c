from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import cycle, islice
from random import Random

import pytest

from decodefleet.worker.kv.block_pool import BlockPool
from decodefleet.worker.kv.eviction import EvictionPolicy, Lru
from decodefleet.worker.kv.hit_density import HitDensity

BLOCKS = 64
POLICIES: list[Callable[[int], EvictionPolicy]] = [lambda _: Lru(), HitDensity, lambda n: HitDensity(n, 8)]


def chain(number: int, length: int) -> list[bytes]:
    # spread evenly, as hashes are
    return [Random(f"{number} {i}").randbytes(16) for i in range(length)]


def ask(pool: BlockPool, names: list[bytes]) -> int:
    """A request that is computed and leaves at once; returns how many blocks it found."""
    found: list[int] = []
    for name in names:
        block = pool.find(name)
        if block is None:
            break
        found.append(block)
    pool.share(found)
    fresh = pool.allocate(len(names) - len(found))
    assert fresh is not None
    for depth, (name, block) in enumerate(zip(names[len(found) :], fresh, strict=True), len(found)):
        pool.commit(block, name, depth)
    pool.release(found + fresh)
    pool.check_integrity()
    return len(found)


def hit_rate(policy: EvictionPolicy, chains: Iterable[list[bytes]]) -> float:
    pool = BlockPool(BLOCKS, eviction=policy)
    asked = [(ask(pool, names), len(names)) for names in chains]
    return sum(hits for hits, _ in asked) / sum(length for _, length in asked)


@pytest.mark.parametrize("make", POLICIES)
def test_a_chain_is_evicted_from_its_tail(make: Callable[[int], EvictionPolicy]) -> None:
    pool = BlockPool(BLOCKS, eviction=make(BLOCKS))
    names = chain(0, 40)
    ask(pool, names)
    # the first half is used once more, so that the halves differ in age and in reuses
    ask(pool, names[:20])
    for length in range(25, 65):
        held = pool.allocate(length)
        assert held is not None
        kept = [pool.find(name) is not None for name in names]
        assert kept == sorted(kept, reverse=True)
        assert sum(kept) == 64 - length
        pool.release(held)


@pytest.mark.parametrize("make", POLICIES)
def test_what_is_in_use_is_no_victim(make: Callable[[int], EvictionPolicy]) -> None:
    policy = make(8)
    policy.computed(1, b"a" * 16, 0)
    policy.computed(2, b"b" * 16, 1)
    policy.add([2, 1])
    policy.reuse([1])
    assert list(policy) == [2]
    assert policy.evict(1) == [2]
    assert len(policy) == 0
    policy.add([1])
    assert policy.clear() == [1]
    assert list(policy) == []


def test_a_loop_larger_than_the_pool_is_held_in_part() -> None:
    """LRU evicts each chain just before it comes again."""
    chains = [chain(number, 8) for number in range(12)]
    assert hit_rate(Lru(), islice(cycle(chains), 600)) == 0
    assert hit_rate(HitDensity(BLOCKS), islice(cycle(chains), 600)) > 0.4


def test_what_comes_back_outlives_what_passes_by() -> None:
    """Four chains are asked now and then among many that come once."""
    rng = Random(0)
    regulars = [chain(number, 8) for number in range(4)]
    passers_by = (chain(number, 8) for number in range(1000, 2000))
    asked = [rng.choice(regulars) if rng.random() < 0.3 else next(passers_by) for _ in range(1000)]
    assert hit_rate(HitDensity(BLOCKS), asked) > 1.5 * hit_rate(Lru(), asked)


def test_of_chains_equally_often_used_the_dearer_one_is_kept() -> None:
    pool = BlockPool(512, eviction=HitDensity(512, doubling=4))
    deep, shallow = chain(0, 32), chain(1, 8)
    ask(pool, deep)
    ask(pool, shallow)
    held = pool.allocate(512 - 32)
    assert held is not None
    assert pool.find(shallow[0]) is None
    assert all(pool.find(name) is not None for name in deep)


def test_reuses_are_remembered_beyond_eviction() -> None:
    """A chain that came twice outlives one that came once, though it was evicted between."""
    pool = BlockPool(512, eviction=HitDensity(512))
    again, once = chain(0, 8), chain(1, 8)
    ask(pool, again)
    pool.release(pool.allocate(512) or [])
    assert pool.find(again[0]) is None
    ask(pool, again)
    ask(pool, once)
    held = pool.allocate(512 - 8)
    assert held is not None
    assert pool.find(once[0]) is None
    assert pool.find(again[7]) is not None


def test_ages_are_caught_up_with_in_small_pieces() -> None:
    """A pool that filled without evicting anything has all of its blocks in the queues of the young."""
    policy = HitDensity(20_000)
    for start in range(0, 20_000, 100):
        blocks = list(range(start, start + 100))
        for block in blocks:
            policy.computed(block, Random(block).randbytes(16), 0)
        policy.add(blocks)
    late = [policy._now - policy._since[block] >= policy._ends[0] for block in policy._queues[0]]
    assert sum(late) < 800

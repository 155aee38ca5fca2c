"""Block accounts of the fake engine: ref counts, prefix cache by hash, LRU eviction, no memory behind them.

Free, cached (evictable but findable) and used blocks add up to the pool at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .protocol import EventSink


class FakePool:
    """Blocks are numbers. Each `match` and `allocate` is given back by one `release`."""

    def __init__(self, total: int, sink: EventSink) -> None:
        self.total = total
        self.evicted = 0
        self._sink = sink
        self._free = list(range(total))
        self._refs = [0] * total
        self._hash_of: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._evictable)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._evictable)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix held, with a reference taken on each."""
        blocks = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            self._refs[block] += 1
            self._evictable.pop(block, None)
            blocks.append(block)
        return blocks

    def allocate(self) -> int | None:
        if self._free:
            block = self._free.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            block_hash = self._hash_of.pop(block)
            del self._by_hash[block_hash]
            self.evicted += 1
            self._sink.kv_removed([block_hash])
        else:
            return None
        self._refs[block] = 1
        return block

    def publish(self, block: int, block_hash: bytes) -> None:
        """A used block is full: let others find it, unless they can find its twin already."""
        if block_hash in self._by_hash or block in self._hash_of:
            return
        self._by_hash[block_hash] = block
        self._hash_of[block] = block_hash
        self._sink.kv_stored([block_hash])

    def release(self, blocks: Sequence[int]) -> None:
        # last block first: a prefix is worth more than its tail
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._hash_of:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def check_integrity(self, held: Sequence[int]) -> None:
        """`held`: all blocks of all sequences, with repetition. Raises AssertionError."""
        counts = [0] * self.total
        for block in held:
            counts[block] += 1
        assert counts == self._refs, "reference counts differ from what sequences hold"
        used = sum(1 for count in counts if count)
        assert used + self.free + self.cached == self.total, "blocks lost or in two states"
        assert not set(self._free) & set(self._evictable), "a block is free and cached"
        assert set(self._evictable) <= set(self._hash_of), "a cached block cannot be found"
        assert {block: block_hash for block_hash, block in self._by_hash.items()} == self._hash_of

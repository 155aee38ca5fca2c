"""The pool of KV blocks: reference counts, the hash index, and who is evicted next.

A block is in exactly one state:

    used     ref > 0; hashed or not, on no list
    cached   ref = 0 and hashed: findable, and evictable
    free     ref = 0 and not hashed

Allocation takes free blocks first, then evicts cached ones in the order of its policy (`eviction.py`). A used
block is never evicted. One more block, `scratch`, is always in use: it stands where a block is not there any
more. Knows nothing of sequences, tensors or tiers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..protocol import EventSink
from .eviction import EvictionPolicy, Lru


class BlockPool:
    """Blocks are integers in [0, total); all methods keep `check_integrity` true.

    kept_below: whether there is a copy of a block elsewhere; evictions of others count as `lost`.
    """

    def __init__(
        self, total: int, sink: EventSink | None = None, eviction: EvictionPolicy | None = None
    ) -> None:
        self.total = self.scratch = total
        self.evictions = self.lost = 0
        self.kept_below: Callable[[bytes], bool] = lambda name: False
        self._sink = sink
        self._refs = [*[0] * total, 1]
        self._hash_of: list[bytes | None] = [None] * total
        # named blocks that the sink does not hear of
        self._silent: set[int] = set()
        self._block_of: dict[bytes, int] = {}
        self._free = deque(range(total))
        self._cached: EvictionPolicy = Lru() if eviction is None else eviction

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that an allocation can have."""
        return len(self._free) + len(self._cached)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, in use or cached."""
        return self._block_of.get(block_hash)

    def is_cached(self, block: int) -> bool:
        """Held by nobody, so that sharing it takes it out of what can be allocated."""
        return self._refs[block] == 0

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each and no content, or None: all or nothing."""
        if count > self.available:
            return None
        free = self._free
        blocks = [free.popleft() for _ in range(min(count, len(free)))]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each; cached blocks come back into use."""
        refs = self._refs
        revived = [block for block in blocks if not refs[block]]
        if revived:
            self._cached.reuse(revived)
        for block in blocks:
            refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Later blocks of a sequence are given up for eviction before earlier
        ones, since a prefix without its beginning is of no use."""
        refs, names = self._refs, self._hash_of
        idle: list[int] = []
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                (self._free if names[block] is None else idle).append(block)
        if idle:
            self._cached.add(idle)

    def commit(self, block: int, block_hash: bytes, depth: int = 0, *, silent: bool = False) -> None:
        """The used block is full and immutable from now on: it can be found by its hash.

        A second block with the same content stays anonymous; the first one keeps the name.
        depth: blocks before it in its sequence, by which policies reckon what it cost.
        silent: tell the sink nothing of this block, neither now nor when it is forgotten.
        """
        if self._hash_of[block] is not None or block_hash in self._block_of:
            return
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        self._cached.computed(block, block_hash, depth)
        if silent:
            self._silent.add(block)
        elif self._sink is not None:
            self._sink.kv_stored([block_hash])

    def clear_cache(self) -> int:
        """Forget all cached blocks; returns how many. Used blocks keep their names."""
        blocks = self._cached.clear()
        self._forget(blocks)
        self._free.extend(blocks)
        return len(blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is in one state and the index is exact."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, refs in enumerate(self._refs[: self.total]) if refs > 0}
        assert self._refs[self.scratch] > 0, "the scratch block is not in use"
        assert len(free) == len(self._free), "a block is twice on the free list"
        assert len(cached) == len(self._cached), "a block is cached twice"
        assert min(self._refs, default=0) >= 0, "negative reference count"
        assert len(free | cached | used) == self.total, "a block is in no state"
        assert len(free) + len(cached) + len(used) == self.total, "a block is in two states"
        assert all(self._hash_of[block] is None for block in free), "a free block has a name"
        assert all(self._hash_of[block] is not None for block in cached), "a cached block has no name"
        named = {name: block for block, name in enumerate(self._hash_of) if name is not None}
        assert named == self._block_of, "the hash index differs from the blocks' names"
        assert self._silent <= set(named.values()), "a block without a name is silent"

    def _evict(self, count: int) -> list[int]:
        blocks = self._cached.evict(count)
        self.lost += sum(not self.kept_below(name) for block in blocks if (name := self._hash_of[block]))
        self._forget(blocks)
        self.evictions += count
        return blocks

    def _forget(self, blocks: Sequence[int]) -> None:
        """Take their names from blocks."""
        told = []
        for block in blocks:
            name = self._hash_of[block]
            assert name is not None
            del self._block_of[name]
            self._hash_of[block] = None
            if block in self._silent:
                self._silent.remove(block)
            else:
                told.append(name)
        if told and self._sink is not None:
            self._sink.kv_removed(told)

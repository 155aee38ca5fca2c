"""What the batcher sees of KV memory: can this sequence have what it needs, and give it back.

Owns the mapping from sequences to blocks: prefix match, growth, copy-on-write, commit of full blocks. Knows
nothing of budgets, tensors or kernels; copies it asks for are executed before the step that writes.
"""

from __future__ import annotations

from ..sequence import Sequence
from .block_pool import BlockPool
from .hashing import extend_chain


class KvManager:
    def __init__(self, pool: BlockPool, block_size: int, *, prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.query_tokens = 0
        self.hit_tokens = 0
        self._prefix_caching = prefix_caching
        self._copies: dict[int, int] = {}

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, seq: Sequence) -> list[int]:
        """Blocks of the longest cached prefix; at least one token is left to compute. Nothing is taken."""
        if not self._prefix_caching or not seq.request.reads_cache:
            return []
        blocks = []
        for block_hash in seq.hashes[: (len(seq.tokens) - 1) // self.block_size]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_admit(self, seq: Sequence, matched: list[int], reserve: int) -> bool:
        """Whether all known tokens fit, leaving `reserve` blocks for those already running."""
        needed = self.blocks_for(seq.length) - len(matched)
        revived = sum(self.pool.is_cached(block) for block in matched)
        return needed + revived + reserve <= self.pool.available

    def attach(self, seq: Sequence, matched: list[int]) -> None:
        """Start a waiting sequence on its cached prefix."""
        assert not seq.blocks
        self.pool.share(matched)
        seq.blocks = list(matched)
        seq.committed = len(matched)
        seq.computed = len(matched) * self.block_size
        if seq.cached_tokens is None:
            seq.cached_tokens = min(seq.computed, seq.prompt_len)
            self.query_tokens += len(seq.tokens)
            self.hit_tokens += seq.computed

    def grow(self, seq: Sequence, count: int) -> bool:
        """Make the next `count` tokens writable: new blocks, and an own copy of a shared last block.

        All or nothing; False means that somebody has to give memory back first.
        """
        written = seq.computed // self.block_size
        shared = written < len(seq.blocks) and self.pool.refs(seq.blocks[written]) > 1
        missing = max(self.blocks_for(seq.computed + count) - len(seq.blocks), 0)
        fresh = self.pool.allocate(missing + shared)
        if fresh is None:
            return False
        if shared:
            source, target = seq.blocks[written], fresh.pop()
            seq.blocks[written] = target
            self._copies[target] = source
            self.pool.release([source])
        seq.blocks.extend(fresh)
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """Block copies (source, target) to run before the step that was just planned."""
        copies, self._copies = self._copies, {}
        return [(source, target) for target, source in copies.items()]

    def commit(self, seq: Sequence) -> None:
        """Blocks that are full, with tokens that are known, get their names."""
        full = min(seq.computed, len(seq.tokens)) // self.block_size
        if full > len(seq.hashes):
            parent = seq.hashes[-1] if seq.hashes else seq.request.root_hash
            start = len(seq.hashes) * self.block_size
            tokens = seq.tokens[start : full * self.block_size]
            seq.hashes.extend(extend_chain(parent, tokens, self.block_size))
        if self._prefix_caching:
            for i in range(seq.committed, full):
                self.pool.commit(seq.blocks[i], seq.hashes[i])
        seq.committed = full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all of the parent's blocks; whoever writes into the last one first copies it."""
        self.pool.share(parent.blocks)
        child.blocks = list(parent.blocks)
        child.hashes = list(parent.hashes)
        child.committed = parent.committed
        child.computed = parent.computed
        child.cached_tokens = parent.cached_tokens

    def release(self, seq: Sequence) -> None:
        """Give all blocks back; what is committed stays findable until evicted."""
        for block in seq.blocks:
            # planned for a sequence that was preempted in the same plan
            self._copies.pop(block, None)
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.computed = seq.committed = 0

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Raises AssertionError unless the pool is sound and its references are the sequences' blocks."""
        self.pool.check_integrity()
        refs = [0] * self.pool.total
        for seq in holders:
            assert len(seq.blocks) >= self.blocks_for(seq.computed), "computed tokens without a block"
            for block in seq.blocks:
                refs[block] += 1
        for block, count in enumerate(refs):
            assert self.pool.refs(block) == count, (
                f"block {block}: {self.pool.refs(block)} refs, {count} holders"
            )

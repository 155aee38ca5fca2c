"""What the batcher sees of KV memory: can this sequence have what it needs, and give it back.

Owns the mapping from sequences to blocks, of all KV groups alike: prefix match, growth, copy-on-write, commit
of full blocks, and giving back what slid out of a group's window. Knows nothing of budgets, tensors or
kernels; copies it asks for are executed before the step that writes.
"""

from __future__ import annotations

from ..sequence import BlockList, Sequence
from .block_pool import BlockPool
from .groups import PLAIN, KvGroups, WindowRule
from .hashing import extend_chain, group_hash
from .prefix import find_prefix


class KvManager:
    """max_chunk: most tokens of a sequence in one step, which a window's memory has to hold besides."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        groups: KvGroups = PLAIN,
        *,
        prefix_caching: bool,
        max_chunk: int = 1,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.groups = groups
        self.query_tokens = 0
        self.hit_tokens = 0
        self._prefix_caching = prefix_caching
        self._max_chunk = max_chunk
        self._rules = [group.rule for group in groups.groups]
        self._sliding = [(g, rule) for g, rule in enumerate(self._rules) if rule.window is not None]
        self._copies: dict[int, int] = {}

    def blocks_for(self, tokens: int) -> int:
        """In each group."""
        return -(-tokens // self.block_size)

    def match(self, seq: Sequence) -> list[BlockList]:
        """Blocks of the longest cached prefix; at least one token is left to compute. Nothing is taken."""
        if not self._prefix_caching or not seq.request.reads_cache:
            return [BlockList([]) for _ in self._rules]
        hashes = seq.hashes[: (len(seq.tokens) - 1) // self.block_size]
        return find_prefix(self.pool, self._rules, hashes, self.block_size)

    def can_admit(self, seq: Sequence, matched: list[BlockList], reserve: int) -> bool:
        """Whether all known tokens fit, leaving a block in each group for `reserve` running sequences."""
        needed, blocks = reserve * len(self._rules), self.blocks_for(seq.length)
        for rule, found in zip(self._rules, matched, strict=True):
            held = [block for block in found.ids if block != self.pool.scratch]
            ahead = blocks - len(found.ids)
            most = rule.most_blocks(seq.length, self.block_size, self._max_chunk)
            needed += min(ahead, most - len(held)) + sum(map(self.pool.is_cached, held))
        return needed <= self.pool.available

    def attach(self, seq: Sequence, matched: list[BlockList]) -> None:
        """Start a waiting sequence on its cached prefix."""
        assert not seq.blocks
        for held in matched:
            self.pool.share(held.ids)
        seq.blocks = matched
        seq.committed = len(matched[0].ids)
        seq.computed = seq.committed * self.block_size
        if seq.cached_tokens is None:
            seq.cached_tokens = min(seq.computed, seq.prompt_len)
            self.query_tokens += len(seq.tokens)
            self.hit_tokens += seq.computed

    def grow(self, seq: Sequence, count: int) -> bool:
        """Make the next `count` tokens writable: new blocks, and an own copy of a shared last block.

        What no token from now on sees is given back first. All or nothing; False means that somebody has to
        give memory back first.
        """
        if self._sliding:
            self._slide(seq)
        pool, written = self.pool, seq.computed // self.block_size
        # a block that is being written is shared in all groups or none: only forks share it
        first = seq.blocks[0].ids
        missing = -(-(seq.computed + count) // self.block_size) - len(first)
        shared = written < len(first) and pool.refs(first[written]) > 1
        if missing <= 0 and not shared:
            return True
        missing = max(missing, 0)
        fresh = pool.allocate((missing + shared) * len(seq.blocks))
        if fresh is None:
            return False
        for own in seq.blocks:
            if shared:
                source, target = own.ids[written], fresh.pop()
                own.ids[written] = target
                self._copies[target] = source
                pool.release([source])
            own.ids += [fresh.pop() for _ in range(missing)]
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """Block copies (source, target) to run before the step that was just planned."""
        copies, self._copies = self._copies, {}
        return [(source, target) for target, source in copies.items()]

    def commit(self, seq: Sequence) -> None:
        """Blocks that are full, with tokens that are known, get their names."""
        full = min(seq.computed, len(seq.tokens)) // self.block_size
        if full == seq.committed:
            return
        if full > len(seq.hashes):
            parent = seq.hashes[-1] if seq.hashes else seq.request.root_hash
            start = len(seq.hashes) * self.block_size
            tokens = seq.tokens[start : full * self.block_size]
            seq.hashes.extend(extend_chain(parent, tokens, self.block_size))
        if self._prefix_caching:
            for g, own in enumerate(seq.blocks):
                for i in range(seq.committed, full):
                    # where the window is shorter than a block, it may be gone before its last token is known
                    if own.ids[i] != self.pool.scratch:
                        self.pool.commit(own.ids[i], group_hash(seq.hashes[i], g), i, silent=g > 0)
        seq.committed = full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all of the parent's blocks; whoever writes into the last one first copies it."""
        for own in parent.blocks:
            self.pool.share(own.ids)
        child.blocks = [BlockList([*own.ids], own.slid) for own in parent.blocks]
        child.hashes = list(parent.hashes)
        child.committed = parent.committed
        child.computed = parent.computed
        child.cached_tokens = parent.cached_tokens

    def release(self, seq: Sequence) -> None:
        """Give all blocks back; what is committed stays findable until evicted."""
        for own in seq.blocks:
            for block in own.ids:
                # planned for a sequence that was preempted in the same plan
                self._copies.pop(block, None)
            self.pool.release(own.ids)
        seq.blocks = []
        seq.computed = seq.committed = 0

    def _slide(self, seq: Sequence) -> None:
        """Give back the blocks that the next token does not see, and so none after it."""
        for g, rule in self._sliding:
            own = seq.blocks[g]
            first = max(own.slid, self.blocks_for(rule.sinks))
            end = rule.first_seen(seq.computed) // self.block_size
            if first < end:
                nothing = [self.pool.scratch] * (end - first)
                self.pool.share(nothing)
                self.pool.release(own.ids[first:end])
                own.ids[first:end] = nothing
                own.slid = end

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Raises AssertionError unless the pool is sound and its references are the sequences' blocks."""
        self.pool.check_integrity()
        refs = [*[0] * self.pool.total, 1]
        for seq in holders:
            assert len(seq.blocks) == len(self._rules), "a group without a list of blocks"
            assert len({len(own.ids) for own in seq.blocks}) == 1, "groups of unlike length"
            for rule, own in zip(self._rules, seq.blocks, strict=True):
                self._check_blocks(seq, rule, own)
                for block in own.ids:
                    refs[block] += 1
        for block, count in enumerate(refs):
            assert self.pool.refs(block) == count, (
                f"block {block}: {self.pool.refs(block)} refs, {count} holders"
            )

    def _check_blocks(self, seq: Sequence, rule: WindowRule, own: BlockList) -> None:
        size, scratch = self.block_size, self.pool.scratch
        assert len(own.ids) >= self.blocks_for(seq.computed), "computed tokens without a block"
        sinks, live = self.blocks_for(rule.sinks), rule.first_seen(seq.computed) // size
        for i, block in enumerate(own.ids):
            if i < sinks or i >= live:
                assert block != scratch, "a block that is still seen was given back"
            elif i < own.slid:
                assert block == scratch, "a block that slid out is still held"

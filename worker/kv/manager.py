"""What the batcher sees of KV memory: can this sequence have what it needs, and give it back.

Owns the mapping from sequences to blocks, of all KV groups alike: prefix match, growth, copy-on-write, commit
of full blocks, and giving back what slid out of a group's window. Tiers below the pool, if there are any, are
`restorer.py`'s. Knows nothing of budgets, tensors or kernels; copies it asks for are executed before the step
that writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..protocol import Peer
from ..sequence import BlockList, Sequence
from .block_pool import BlockPool
from .groups import PLAIN, KvGroups, WindowRule, drop_unit
from .hashing import extend_chain, group_hash
from .prefix import Places, find_prefix
from .restorer import Place, Prefix, Restorer
from .tiers.tiers import KvTiers


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
        tiers: KvTiers | None = None,
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
        self._unit = drop_unit(block_size)
        self._copies: dict[int, int] = {}
        self._restorer = None if tiers is None else Restorer(tiers, pool, self._rules, block_size)

    @property
    def swapped(self) -> int:
        """Preemptions whose KV is kept below the pool."""
        return self._restorer.swapped if self._restorer is not None else 0

    def blocks_for(self, tokens: int) -> int:
        """In each group."""
        return -(-tokens // self.block_size)

    def match(self, seq: Sequence) -> Prefix:
        """The longest cached prefix; at least one token is left to compute. Nothing is taken."""
        if not self._prefix_caching or not seq.request.reads_cache:
            return Prefix([Places([]) for _ in self._rules], tokens=0, named=0)
        hashes = self._reusable(seq)
        near: list[Places[Place]] = find_prefix(
            self.pool.find, self.pool.scratch, self._rules, hashes, self.block_size
        )
        count = len(near[0].each)
        prefix = Prefix(near, count * self.block_size, count)
        return prefix if self._restorer is None else self._restorer.match(seq, hashes, prefix)

    def can_admit(self, seq: Sequence, prefix: Prefix, reserve: int) -> bool:
        """Whether all known tokens fit, leaving a block in each group for `reserve` running sequences."""
        needed, blocks = reserve * len(self._rules) + len(prefix.below), self.blocks_for(seq.length)
        for rule, found in zip(self._rules, prefix.groups, strict=True):
            held = [place for place in found.each if place != self.pool.scratch]
            ahead = blocks - len(found.each)
            most = rule.most_blocks(seq.length, self.block_size, self._max_chunk)
            revived = sum(self.pool.is_cached(place) for place in held if isinstance(place, int))
            needed += min(ahead, most - len(held)) + revived
        return needed <= self.pool.available

    def attach(self, seq: Sequence, prefix: Prefix) -> None:
        """Start a waiting sequence on its cached prefix."""
        assert not seq.blocks
        if self._restorer is None:
            for found in prefix.groups:
                ids = [place for place in found.each if isinstance(place, int)]
                self.pool.share(ids)
                seq.blocks.append(BlockList(ids, found.slid))
        else:
            seq.blocks = self._restorer.attach(seq, prefix, self._reusable(seq))
        for g, rule in self._sliding:
            self._drop(rule, seq.blocks[g])
        seq.committed, seq.computed = prefix.named, prefix.tokens
        if not seq.restoring:
            self._count_hit(seq)

    def settle_restored(self, seq: Sequence) -> bool:
        """A sequence that is being restored: False where what it waits for is lost, and it has to give its
        blocks back."""
        assert self._restorer is not None
        arrived = self._restorer.outcome(seq)
        if arrived:
            self._count_hit(seq)
        return arrived is not False

    def grow(self, seq: Sequence, count: int) -> bool:
        """Make the next `count` tokens writable: new blocks, and an own copy of a shared last block.

        What no token from now on sees is given back first. All or nothing; False means that somebody has to
        give memory back first.
        """
        if self._sliding:
            self._slide(seq)
        pool, written, first = self.pool, seq.computed // self.block_size, seq.blocks[0]
        end = first.dropped + len(first.ids)
        missing = -(-(seq.computed + count) // self.block_size) - end
        # a block that is being written is shared in all groups or none: only forks share it
        shared = written < end and pool.refs(first.ids[written - first.dropped]) > 1
        if missing <= 0 and not shared:
            return True
        missing = max(missing, 0)
        fresh = self._allocate((missing + shared) * len(seq.blocks))
        if fresh is None:
            return False
        for own in seq.blocks:
            if shared:
                entry = written - own.dropped
                source, target = own.ids[entry], fresh.pop()
                own.ids[entry] = target
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
                # where the window is shorter than a block, that may be gone before its last token is known
                for i in range(max(seq.committed, own.slid), full):
                    block = own.ids[i - own.dropped]
                    self._name(block, group_hash(seq.hashes[i], g), i, silent=g > 0)
        seq.committed = full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all of the parent's blocks; whoever writes into the last one first copies it."""
        for own in parent.blocks:
            self.pool.share(own.ids)
        child.blocks = [replace(own, ids=[*own.ids]) for own in parent.blocks]
        child.hashes = list(parent.hashes)
        child.committed = parent.committed
        child.computed = parent.computed
        child.cached_tokens = parent.cached_tokens

    def swap_out(self, seq: Sequence) -> None:
        """Keep what a preempted sequence computed below the pool, if that can be; before its release."""
        if self._restorer is not None:
            self._restorer.swap_out(seq, self._copies)

    def offer(self, seq: Sequence, peer: Peer) -> None:
        """Another worker is said to hold the first blocks of this sequence."""
        if self._restorer is not None and self._prefix_caching:
            named = seq.hashes[: peer.blocks]
            names = (group_hash(name, g) for g in range(len(self._rules)) for name in named)
            self._restorer.tiers.offer(peer, names)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended: what was kept for it alone goes."""
        if self._restorer is not None:
            self._restorer.forget(seq)

    def release(self, seq: Sequence) -> None:
        """Give all blocks back; what is committed stays findable until evicted."""
        if self._restorer is not None:
            self._restorer.leave(seq)
        for own in seq.blocks:
            for block in own.ids:
                # planned for a sequence that was preempted in the same plan
                self._copies.pop(block, None)
            self.pool.release(own.ids)
        seq.blocks = []
        seq.computed = seq.committed = 0

    def _allocate(self, count: int) -> list[int] | None:
        """Blocks that the next step may write."""
        blocks = self.pool.allocate(count)
        if self._restorer is None:
            return blocks
        tiers = self._restorer.tiers
        if blocks is None and tiers.reclaim():
            blocks = self.pool.allocate(count)
        tiers.settle(blocks or ())
        return blocks

    def _name(self, block: int, name: bytes, depth: int, *, silent: bool) -> None:
        self.pool.commit(block, name, depth, silent=silent)
        if self._restorer is not None:
            self._restorer.tiers.keep(name, silent=silent)

    def _reusable(self, seq: Sequence) -> list[bytes]:
        """Hashes of the blocks that a prefix may consist of: at least one token is left to compute."""
        return seq.hashes[: (len(seq.tokens) - 1) // self.block_size]

    def _count_hit(self, seq: Sequence) -> None:
        if seq.cached_tokens is None:
            seq.cached_tokens = min(seq.computed, seq.prompt_len)
            self.query_tokens += len(seq.tokens)
            self.hit_tokens += seq.computed

    def _slide(self, seq: Sequence) -> None:
        """Give back the blocks that the next token does not see, and so none after it."""
        for g, rule in self._sliding:
            own = seq.blocks[g]
            first = max(own.slid, self.blocks_for(rule.sinks))
            end = rule.first_seen(seq.computed) // self.block_size
            if first < end:
                entries = slice(first - own.dropped, end - own.dropped)
                nothing = [self.pool.scratch] * (end - first)
                self.pool.share(nothing)
                self.pool.release(own.ids[entries])
                own.ids[entries] = nothing
                own.slid = end
                self._drop(rule, own)

    def _drop(self, rule: WindowRule, own: BlockList) -> None:
        """Forget entries of what slid out, so that lists and tables stay short however long the sequence."""
        kept = rule.kept_entries(self.block_size)
        dropped = (own.slid - kept) // self._unit * self._unit
        if dropped > own.dropped:
            gone = slice(kept, kept + dropped - own.dropped)
            self.pool.release(own.ids[gone])
            # another list, by which tables see that entries moved
            own.ids = [*own.ids[: gone.start], *own.ids[gone.stop :]]
            own.kept, own.dropped = kept, dropped

    def check_integrity(self, holders: list[Sequence], waiting: Iterable[Sequence] = ()) -> None:
        """Raises AssertionError unless the pool is sound and its references are the sequences' blocks.

        waiting: sequences that hold no blocks, but may have some in a tier below.
        """
        self.pool.check_integrity()
        refs = [*[0] * self.pool.total, 1]
        if self._restorer is not None:
            self._restorer.check_integrity(holders, waiting)
            for block in self._restorer.tiers.held_blocks():
                refs[block] += 1
        for seq in holders:
            assert len(seq.blocks) == len(self._rules), "a group without a list of blocks"
            assert len({own.end for own in seq.blocks}) == 1, "groups of unlike length"
            for rule, own in zip(self._rules, seq.blocks, strict=True):
                self._check_blocks(seq, rule, own)
                for block in own.ids:
                    refs[block] += 1
        for block, count in enumerate(refs):
            assert self.pool.refs(block) == count, (
                f"block {block}: {self.pool.refs(block)} refs, {count} holders"
            )

    def _check_blocks(self, seq: Sequence, rule: WindowRule, own: BlockList) -> None:
        scratch, kept = self.pool.scratch, rule.kept_entries(self.block_size)
        assert own.end >= self.blocks_for(seq.computed), "computed tokens without a block"
        assert own.dropped == max(own.slid - kept, 0) // self._unit * self._unit, "entries not dropped"
        sinks, live = self.blocks_for(rule.sinks), rule.first_seen(seq.computed) // self.block_size
        for entry, block in enumerate(own.ids):
            i = entry if entry < kept else entry + own.dropped
            if i < sinks or i >= live:
                assert block != scratch, "a block that is still seen was given back"
            elif i < own.slid:
                assert block == scratch, "a block that slid out is still held"

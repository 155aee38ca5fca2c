"""Sequences and the tiers below the pool: what one gets back from there, and what one leaves there.

A waiting sequence whose prefix goes on below is admitted with blocks that are still to arrive, and waits for
them among the running, which may preempt it like any other. A preempted one leaves its blocks below: named
ones under their names, where anybody may find them, the rest under names that only it knows. Knows nothing of
budgets, bytes and threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

from ..sequence import BlockList, Sequence
from .block_pool import BlockPool
from .groups import WindowRule
from .hashing import HASH_BYTES, group_hash
from .prefix import Places, find_prefix
from .tiers.loader import Load, Wanted
from .tiers.saver import Leaving
from .tiers.tier import Tier
from .tiers.tiers import Below, KvTiers

Place = int | Load | Below


@dataclass(frozen=True)
class Prefix:
    """The part of a sequence that need not be computed.

    groups: where its blocks are: in the pool, on their way there, or below. named: how many of them anybody
    may find. declined: tiers that hold more, which takes longer to bring back than to compute.
    """

    groups: Rows[Places[Place]]
    tokens: int
    named: int
    declined: Rows[Tier] = ()

    @property
    def below(self) -> list[Below]:
        """What has to be brought back."""
        return [place for own in self.groups for place in own.each if isinstance(place, Below)]


@dataclass(frozen=True)
class _Swap:
    """What a preempted sequence left below, behind its `named` blocks. names: by group; None: slid out."""

    named: int
    computed: int
    names: list[list[bytes | None]] = field(repr=False)

    @property
    def left(self) -> list[bytes]:
        return [name for own in self.names for name in own if name is not None]


class Restorer:
    """swapped: preemptions whose KV is kept, all of it."""

    def __init__(self, tiers: KvTiers, pool: BlockPool, rules: Rows[WindowRule], block_size: int) -> None:
        self.swapped = 0
        self.tiers = tiers
        self._pool = pool
        self._rules = rules
        self._block_size = block_size
        self._swaps: dict[Sequence, _Swap] = {}
        self._awaited: dict[Sequence, list[Load]] = {}

    def match(self, seq: Sequence, hashes: Rows[bytes], near: Prefix) -> Prefix:
        """The prefix that saves most time, where `near` is what the pool holds. Nothing is taken."""
        far = self._prefix(hashes)
        swap = self._swaps.get(seq)
        if swap is not None and swap.computed > far.tokens:
            far = self._with_rest(swap, hashes) or far
        best, saved = near, 0.0
        for prefix in (far, *self._shorter(far, hashes)):
            if prefix.tokens > near.tokens:
                blocks = (prefix.tokens - near.tokens) / self._block_size
                gain = self.tiers.saved_s(blocks, [place.tier for place in prefix.below])
                if gain > saved:
                    best, saved = prefix, gain
        if best is near and far.tokens > near.tokens:
            return replace(near, declined=[*{place.tier for place in far.below}])
        return best

    def attach(self, seq: Sequence, prefix: Prefix, hashes: Rows[bytes]) -> list[BlockList]:
        """The sequence's blocks, its own by now; it is `restoring` where some are still to arrive."""
        # what is there must not be evicted for what is to come
        for own in prefix.groups:
            self._pool.share([place for place in own.each if isinstance(place, int)])
        fresh = self._pool.allocate(len(prefix.below))
        assert fresh is not None, "the prefix was found to fit"
        self.tiers.settle(fresh)
        awaited: list[Load] = []
        wanted: list[Wanted] = []
        blocks = []
        for own in prefix.groups:
            ids = [self._take(place, i, fresh, awaited, wanted) for i, place in enumerate(own.each)]
            blocks.append(BlockList(ids, own.slid))
        awaited += self.tiers.restore(wanted)
        self.tiers.touch(group_hash(name, g) for g in range(len(blocks)) for name in hashes[: prefix.named])
        for tier in prefix.declined:
            tier.link.forgive()
        if prefix.tokens == prefix.named * self._block_size:
            self.forget(seq)
        if awaited:
            self._awaited[seq] = awaited
            seq.restoring = True
        return blocks

    def outcome(self, seq: Sequence) -> bool | None:
        """Whether all that the sequence waits for has arrived; None while some is on its way.

        False: some of it is lost, and its blocks are of no use to the sequence.
        """
        awaited = self._awaited[seq]
        if any(load.hopeless for load in awaited):
            return False
        if not all(load.ended for load in reversed(awaited)):
            return None
        arrived = all(load.arrived for load in awaited)
        if arrived:
            self.leave(seq)
            self.forget(seq)
        return arrived

    def leave(self, seq: Sequence) -> None:
        """The sequence waits no more."""
        seq.restoring = False
        self.tiers.leave(self._awaited.pop(seq, ()))

    def swap_out(self, seq: Sequence, copies: Mapping[int, int]) -> None:
        """Keep what a sequence has computed, which is about to give its blocks back.

        copies: planned ones, source by target; where a block is to be had before they are made.
        """
        if seq.restoring or not seq.request.reads_cache:
            return
        leaving, rest = [], []
        end = -(-seq.computed // self._block_size)
        for g, own in enumerate(seq.blocks):
            ids = own.whole(self._pool.scratch)
            named = [group_hash(name, g) for name in seq.hashes[: seq.committed]]
            names = [
                None if block == self._pool.scratch else os.urandom(HASH_BYTES)
                for block in ids[seq.committed : end]
            ]
            for i, name in enumerate([*named, *names]):
                if name is not None and ids[i] != self._pool.scratch:
                    block = copies.get(ids[i], ids[i])
                    leaving.append(Leaving(name, block, silent=g > 0, private=i >= seq.committed))
            rest.append(names)
        swap = _Swap(seq.committed, seq.computed, rest)
        if self.tiers.evacuate(leaving):
            self.swapped += 1
            self._swaps[seq] = swap
        else:
            self.tiers.discard(swap.left)

    def forget(self, seq: Sequence) -> None:
        """What the sequence left below for itself is of no use any more."""
        swap = self._swaps.pop(seq, None)
        if swap is not None:
            self.tiers.discard(swap.left)

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raises AssertionError where anything is kept for a sequence that is not there."""
        running = set(running)
        assert self._awaited.keys() == {seq for seq in running if seq.restoring}, "a stranger is restored"
        assert self._swaps.keys() <= running | set(waiting), "a stranger left something below"
        self.tiers.check_integrity()

    def _take(
        self, place: Place, depth: int, fresh: list[int], awaited: list[Load], wanted: list[Wanted]
    ) -> int:
        """The block of the pool that is, or will be, where `place` says."""
        if isinstance(place, Load):
            self.tiers.join(place)
            awaited.append(place)
            return place.block
        if isinstance(place, Below):
            wanted.append(Wanted(place.name, fresh[len(wanted)], depth, place.private))
            return wanted[-1].block
        return place

    def _prefix(self, hashes: Rows[bytes]) -> Prefix:
        """The longest prefix that is anywhere."""
        groups: list[Places[Place]] = find_prefix(
            self._find, self._pool.scratch, self._rules, hashes, self._block_size
        )
        count = len(groups[0].each)
        return Prefix(groups, count * self._block_size, count)

    def _find(self, name: bytes) -> Place | None:
        block = self._pool.find(name)
        return self.tiers.find(name) if block is None else block

    def _shorter(self, far: Prefix, hashes: Rows[bytes]) -> list[Prefix]:
        """The prefixes up to where a tier begins, the longest first."""
        begins: dict[Tier, int] = {}
        for i, place in enumerate(far.groups[0].each):
            if isinstance(place, Below):
                begins.setdefault(place.tier, i)
        return [self._prefix(hashes[:i]) for i in reversed(begins.values()) if i]

    def _with_rest(self, swap: _Swap, hashes: Rows[bytes]) -> Prefix | None:
        """All that the sequence had computed; None unless all of it is there."""
        prefix = self._prefix(hashes[: swap.named])
        if prefix.named < swap.named:
            return None
        groups = []
        for own, names in zip(prefix.groups, swap.names, strict=True):
            rest: list[Place] = []
            for name in names:
                place: Place | None = self._pool.scratch
                if name is not None:
                    place = self.tiers.find_private(name)
                if place is None:
                    return None
                rest.append(place)
            groups.append(Places([*own.each, *rest], own.slid))
        return Prefix(groups, swap.computed, swap.named)

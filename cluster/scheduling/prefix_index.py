"""Which worker holds which KV block: the scheduler's local copy of the directory, and its own memory.

Per tier one map hash -> bitmask of workers, fed by the directory. Beside it what was dispatched lately: a
worker will hold the whole chain of a prompt that was sent to it, so that few of its blocks stand for it
(`recent_chains`), for a short time. Only a prediction: a wrong entry costs a recomputation, never an answer.
Knows nothing of liveness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_

from decodefleet.worker.protocol import Tier

from .block_holders import Slots, TierMap, note_leading
from .chain import Chain
from .recent_chains import RecentChains
from .view import Hit, WorkerKey

_SWEEP = 20_000
# so many blocks of a chain are looked up one by one; behind them, its marks
_EXACT = 16


Lookup = Callable[[bytes, int], int]


class PrefixIndex:
    """max_blocks bounds the entries of each tier and, apart from them, those of dispatched chains."""

    def __init__(self, max_blocks: int = 2_000_000) -> None:
        self._slots = Slots()
        self._max_blocks = max_blocks
        self._tiers: dict[Tier, TierMap] = {}
        self._recent = RecentChains(max_blocks)
        self._turned = float("-inf")

    def __len__(self) -> int:
        """Block hashes known, of all tiers."""
        return sum(len(tier.holders) for tier in self._tiers.values())

    def counts(self) -> dict[WorkerKey, dict[Tier, int]]:
        """Blocks per worker and tier, as the directory told."""
        return {
            worker: {tier: len(blocks.held.get(slot, ())) for tier, blocks in self._tiers.items()}
            for slot, worker in self._slots.owners.items()
        }

    def stored(self, worker: WorkerKey, hashes: Iterable[bytes], tier: Tier = "gpu") -> None:
        slot = self._slots.of(worker)
        self._tiers.setdefault(tier, TierMap(self._max_blocks)).add(slot, hashes)

    def removed(self, worker: WorkerKey, hashes: Iterable[bytes], tier: Tier = "gpu") -> None:
        slot = self._slots.find(worker)
        if slot is not None and tier in self._tiers:
            self._tiers[tier].discard(slot, hashes)

    def dispatched(self, worker: WorkerKey, marks: Sequence[bytes]) -> None:
        """The prompt with these marks was sent there: count its blocks as held for now (`tick`)."""
        if marks:
            self._recent.add(self._slots.of(worker), marks)

    @property
    def turned_at(self) -> float:
        """What was dispatched since lives as long as what is dispatched now."""
        return self._turned

    def clear(self, worker: WorkerKey) -> None:
        """Forget a worker. Its bit is used again only once every trace of it is swept (`tick`)."""
        slot = self._slots.retire(worker)
        if slot is not None:
            self._recent.forget(slot)

    def tick(self, now: float, recent_s: float) -> bool:
        """A bounded piece of housekeeping. What was dispatched is forgotten after once to twice `recent_s`.

        True when something dispatched is being forgotten: what has not started yet may be told again.
        """
        turn = now - self._turned >= recent_s
        if turn:
            self._turned = now
            self._recent.turn()
        self._recent.sweep(_SWEEP)
        self._sweep_retired()
        return turn

    def _sweep_retired(self) -> None:
        budget = _SWEEP
        for slot in tuple(self._slots.retired):
            for tier in self._tiers.values():
                budget -= tier.sweep(slot, budget)
            if budget <= 0:
                return
            self._slots.reuse(slot)

    def hits(self, chain: Chain) -> dict[WorkerKey, Hit]:
        """Leading blocks of the chain per worker that holds any."""
        active = self._slots.active_mask
        if not chain.length or not active:
            return {}
        gpu = self._walk(("gpu",), chain, active)
        for slot, blocks in self._recent.leading(chain, active).items():
            if blocks > gpu.get(slot, 0):
                gpu[slot] = blocks
        owners = self._slots.owners
        below = {tier for tier, held in self._tiers.items() if tier != "gpu" and held.holders}
        if not below:
            return {owners[slot]: Hit(blocks, blocks, blocks) for slot, blocks in gpu.items()}
        memory = self._walk(("gpu", "cpu"), chain, active) if "cpu" in below else gpu
        anywhere = self._walk(("gpu", "cpu", "nvme"), chain, active) if "nvme" in below else memory
        return {
            owners[slot]: _hit(gpu.get(slot, 0), memory.get(slot, 0), anywhere.get(slot, 0))
            for slot in gpu.keys() | memory.keys() | anywhere.keys()
        }

    def _walk(self, tiers: Sequence[Tier], chain: Chain, alive: int) -> dict[int, int]:
        """Leading blocks per slot over the union of `tiers`; stops at the first block that nobody holds.

        Caches give up the ends of chains first, so that behind the first blocks marks are enough; where a
        holder drops out between two of them is found by bisection. A hole that has no mark in it, of a few
        blocks or an eighth of what lies before it, is overlooked.
        """
        holders = _lookup([self._tiers[tier].holders for tier in tiers if tier in self._tiers])
        leading: dict[int, int] = {}
        length = 0
        for block in chain.part(0, _EXACT):
            missing = alive & ~holders(block, 0)
            if missing:
                note_leading(leading, missing, length)
                alive ^= missing
                if not alive:
                    return leading
            length += 1
        for mark, position in zip(chain.marks, chain.positions, strict=True):
            if position < length:
                continue
            missing = alive & ~holders(mark, 0)
            if missing:
                _narrow(leading, holders, chain, length, position, missing)
                alive ^= missing
                if not alive:
                    return leading
            length = position + 1
        note_leading(leading, alive, length)
        return leading

    def check_integrity(self) -> None:
        """Masks and per-worker sets tell the same; retired and free bits are nobody's."""
        for tier in self._tiers.values():
            tier.check_integrity()
        self._slots.check_integrity()
        known = set(self._slots.owners) | self._slots.retired
        for tier in self._tiers.values():
            assert set(tier.held) <= known, "a block is held by an unknown bit"


def _hit(gpu: int, memory: int, anywhere: int) -> Hit:
    # what was dispatched counts as held by the GPU, before any tier has it
    memory = max(gpu, memory)
    return Hit(max(memory, anywhere), gpu, memory)


def _lookup(maps: Sequence[dict[bytes, int]]) -> Lookup:
    """Bitmask of who holds a block in any of the maps."""
    if len(maps) == 1:
        return maps[0].get
    return lambda block, nobody: reduce(or_, (held.get(block, nobody) for held in maps), nobody)


def _narrow(
    leading: dict[int, int], holders: Lookup, chain: Chain, least: int, most: int, slots: int
) -> None:
    """Note how many blocks each of `slots` holds: `least` or more, not the one at `most`."""
    if least == most:
        note_leading(leading, slots, least)
        return
    middle = (least + most) // 2
    there = slots & holders(chain.block(middle), 0)
    if there:
        _narrow(leading, holders, chain, middle + 1, most, there)
    if slots != there:
        _narrow(leading, holders, chain, least, middle, slots ^ there)

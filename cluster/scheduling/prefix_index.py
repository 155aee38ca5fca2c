"""Which worker holds which KV block: the scheduler's local copy of the directory, and its own memory.

Per tier one map hash -> bitmask of workers, fed by the directory. Beside it what was dispatched lately: a
worker will hold the whole chain of a prompt that was sent to it, so that few of its blocks stand for it
(`recent_chains`), for a short time. Only a prediction: a wrong entry costs a recomputation, never an answer.
Knows nothing of liveness.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from decodefleet.worker.kv.hashing import HASH_BYTES
from decodefleet.worker.protocol import Tier

from .block_holders import Slots, TierMap, note_leading
from .recent_chains import RecentChains
from .view import Hit, WorkerKey

_SWEEP = 20_000


def unpack_hashes(packed: bytes) -> tuple[bytes, ...]:
    """The whole hashes in `packed`; four times as fast as slicing for a thousand blocks."""
    count = len(packed) // HASH_BYTES
    return struct.unpack_from(f"{HASH_BYTES}s" * count, packed)


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

    def dispatched(self, worker: WorkerKey, hashes: Sequence[bytes]) -> None:
        """A prompt was sent there: count its blocks as held for now (`tick`)."""
        if hashes:
            self._recent.add(self._slots.of(worker), hashes)

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

    def hits(self, hashes: Sequence[bytes]) -> dict[WorkerKey, Hit]:
        """Leading blocks of the chain per worker that holds any."""
        active = self._slots.active_mask
        if not hashes or not active:
            return {}
        gpu = self._walk(("gpu",), hashes, active)
        for slot, blocks in self._recent.leading(hashes, active).items():
            if blocks > gpu.get(slot, 0):
                gpu[slot] = blocks
        owners = self._slots.owners
        below = {tier for tier, held in self._tiers.items() if tier != "gpu" and held.holders}
        if not below:
            return {owners[slot]: Hit(blocks, blocks, blocks) for slot, blocks in gpu.items()}
        memory = self._walk(("gpu", "cpu"), hashes, active) if "cpu" in below else gpu
        anywhere = self._walk(("gpu", "cpu", "nvme"), hashes, active) if "nvme" in below else memory
        return {
            owners[slot]: _hit(gpu.get(slot, 0), memory.get(slot, 0), anywhere.get(slot, 0))
            for slot in gpu.keys() | memory.keys() | anywhere.keys()
        }

    def _walk(self, tiers: Sequence[Tier], hashes: Sequence[bytes], alive: int) -> dict[int, int]:
        """Leading blocks per slot over the union of `tiers`; stops at the first block that nobody holds."""
        maps = [self._tiers[tier].holders for tier in tiers if tier in self._tiers]
        if not maps:
            return {}
        columns = [map(held.get, hashes) for held in maps]
        leading: dict[int, int] = {}
        length = 0
        if len(columns) == 1:
            merged: Iterable[int | None] = columns[0]
        else:
            merged = (_union(masks) for masks in zip(*columns, strict=True))
        for holders in merged:
            if not holders or not (holders := holders & alive):
                break
            if holders != alive:
                note_leading(leading, alive & ~holders, length)
                alive = holders
            length += 1
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


def _union(masks: Sequence[int | None]) -> int:
    merged = 0
    for mask in masks:
        merged |= mask or 0
    return merged

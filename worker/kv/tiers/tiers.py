"""What the KV manager sees of the tiers below the main pool: keep this block, where is it, bring it back.

Owns the order in which the parts are asked, and the choice between restoring and computing. All methods
belong to the engine's thread; bytes move in others. Knows nothing of sequences.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from ...config import RestorePolicy
from ...protocol import Peer, TierStats
from ...protocol import Tier as TierName
from .loader import Load, Loader, Wanted
from .neighbours import Neighbours
from .saver import Leaving, Saver
from .tier import Tier
from .transfers import Transfers


class Below(NamedTuple):
    """A block that a tier holds. private: for one sequence only."""

    name: bytes
    tier: Tier
    private: bool = False


class KvTiers:
    """tiers: our own, fastest first. staged: the first is but a stage on the way to the second, if there is
    one. peers: other workers, whose memory comes last.

    policy: whether restoring has to be faster than computing ("auto"), or is always done.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        saver: Saver,
        loader: Loader,
        transfers: Transfers,
        peers: Neighbours | None = None,
        *,
        slab_bytes: int,
        policy: RestorePolicy,
        staged: bool,
        close: Callable[[], None],
    ) -> None:
        self._tiers = tiers
        self._public = tiers[1:] if staged else tiers
        self._saver = saver
        self._loader = loader
        self._transfers = transfers
        self._peers = peers
        self._all = tiers if peers is None else [*tiers, peers.tier]
        self._slab_bytes = slab_bytes
        self._policy = policy
        self._close = close
        self._compute_s = float("inf")
        self._idle_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether anything is on its way, or waits to be."""
        lending = self._peers is not None and self._peers.busy
        return self._transfers.outstanding > 0 or self._saver.busy or lending

    @property
    def stall_s(self) -> float:
        """Seconds for which the engine stood still for a copy."""
        return self._idle_s + self._saver.stall_s

    def learn(self, compute_s: float) -> None:
        """compute_s: seconds of computing the tokens of one block anew. Decides what is worth keeping."""
        self._compute_s = compute_s
        for tier in self._tiers:
            seconds = self._slab_bytes / tier.link.measured_bytes_per_s
            tier.keeps = tier.alive and (self._policy == "always" or seconds < compute_s)
        if self._public is not self._tiers:
            self._tiers[0].keeps = any(tier.keeps for tier in self._public)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in what has ended and start what there is room for; waits up to the timeout for something.

        Other ranks hear of it with what the plan begins (`dispatch`), or else with the next poll.
        """
        began = time.perf_counter()
        lending = self._peers is not None and self._peers.busy
        self._transfers.poll(timeout_s)
        if self._peers is not None and lending:
            # where nothing else is under way, nobody has waited yet
            self._peers.poll(0.0 if self._transfers.outstanding else timeout_s)
        if timeout_s and self._loader.blocks:
            self._idle_s += time.perf_counter() - began
        self._loader.check_progress()
        self._saver.advance()

    def dispatch(self) -> None:
        """What a plan has begun, before its step is submitted."""
        self._transfers.dispatch()

    def keep(self, name: bytes, *, silent: bool) -> None:
        """A block of the pool has got this name: have a copy of it, if it is worth that."""
        self._saver.offer(name, silent)

    def evacuate(self, leaving: Sequence[Leaving]) -> bool:
        """Copy blocks that the very next step may write; whether there was room for all."""
        return self._saver.evacuate(leaving)

    def settle(self, blocks: Iterable[int]) -> None:
        """Returns once the next step may write these blocks."""
        self._saver.settle(blocks)

    def holds(self, name: bytes) -> bool:
        """Whether some tier of ours has the block, or will have it soon."""
        return any(tier.holds(name) for tier in self._tiers)

    def find(self, name: bytes) -> Load | Below | None:
        """Where a block that is not in the pool can be had."""
        load = self._loader.find(name)
        if load is not None:
            return load
        for tier in self._all:
            if tier.slots.find(name) is not None:
                return Below(name, tier)
        return None

    def offer(self, peer: Peer, names: Iterable[bytes]) -> None:
        """Another worker is said to hold these blocks."""
        if self._peers is not None:
            self._peers.offer(peer, names)

    def find_private(self, name: bytes) -> Below | None:
        """What one sequence left for itself."""
        tier = self._tiers[0]
        return None if tier.slots.find(name) is None else Below(name, tier, private=True)

    def saved_s(self, blocks: float, tiers: Sequence[Tier]) -> float:
        """Seconds won by bringing back one block from each of `tiers` and so not computing `blocks` anew.

        The choice between restoring and computing: positive means restore.
        """
        if self._policy == "always":
            return blocks
        return blocks * self._compute_s - sum(
            tier.link.seconds(count * self._slab_bytes + self._loader.queued_bytes(tier))
            for tier, count in Counter(tiers).items()
        )

    def touch(self, names: Iterable[bytes]) -> None:
        """These blocks are of use, wherever else they are."""
        for name in names:
            for tier in self._all:
                tier.slots.touch(name)

    def restore(self, wanted: Sequence[Wanted]) -> list[Load]:
        """Bring blocks back, each of which a tier holds."""
        return self._loader.start(wanted) if wanted else []

    def reclaim(self) -> bool:
        """Whether blocks came free when loads were waited for that nobody waits for any more."""
        return self._loader.reclaim()

    def join(self, load: Load) -> None:
        self._loader.join(load)

    def leave(self, loads: Iterable[Load]) -> None:
        self._loader.leave(loads)

    def discard(self, names: Iterable[bytes]) -> None:
        """Private blocks that nobody needs any more."""
        for name in names:
            self._tiers[0].discard(name)

    def held_blocks(self) -> list[int]:
        """Blocks of the pool to each of which a load, or a loan, holds a reference."""
        lent = [] if self._peers is None else self._peers.lent_blocks
        return [*self._loader.blocks, *lent]

    def clear(self) -> int:
        """Forget all blocks, on disk too; returns how many there were."""
        self._saver.clear()
        try:
            self._transfers.clear_files()
        except OSError as error:
            self._tiers[-1].fail(error)
        if self._peers is not None:
            self._peers.tier.clear()
        return sum(tier.clear() for tier in self._tiers)

    def stats(self) -> dict[TierName, TierStats]:
        told = {tier.name: tier.stats() for tier in self._public}
        if self._peers is not None:
            told["peer"] = self._peers.stats()
        if self._public is not self._tiers and self._public:
            # what was still on the way to the slower tier was found there as well
            stage, tier = self._tiers[0], self._tiers[1]
            told[tier.name] = msgspec.structs.replace(
                told[tier.name],
                restored_blocks=stage.restored_blocks + tier.restored_blocks,
                restored_bytes=stage.restored_bytes + tier.restored_bytes,
            )
        return told

    def close(self) -> None:
        """Ends all threads; what is not on disk by then is lost."""
        if self._peers is not None:
            self._peers.close()
        self._close()

    def check_integrity(self) -> None:
        for tier in self._all:
            tier.slots.check_integrity()

"""Other workers, as KV tiers see them: one more tier, to fetch from, and blocks of ours that are lent.

How they are reached is `worker/peers/`'s business, which implements this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from ...protocol import Peer, TierStats
from ..block_pool import BlockPool
from .copies import Copies
from .store import Done, Moved, Piece
from .tier import Tier


class Neighbours(Protocol):
    """All methods belong to the engine's thread."""

    @property
    def tier(self) -> Tier: ...

    @property
    def busy(self) -> bool:
        """Whether others wait for blocks of ours, or are being given some."""

    @property
    def lent_blocks(self) -> list[int]:
        """Blocks of the pool to each of which a loan holds a reference."""

    def offer(self, peer: Peer, names: Iterable[bytes]) -> None:
        """These blocks can be fetched from this worker."""

    def fetch(self, pieces: Sequence[Piece], done: Done) -> Future[Moved]:
        """As `Store.start`."""

    def poll(self, timeout_s: float = 0.0) -> None: ...

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...


MakeNeighbours = Callable[[BlockPool, Copies, Tier, Callable[[int], bytes]], Neighbours]
"""From the pool, ways to and from it, the host tier, and what reads a slot of that."""

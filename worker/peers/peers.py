"""What a worker's KV tiers see of other workers (`kv/tiers/neighbours.py`): a tier to fetch from, and blocks
that are lent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from ..kv.block_pool import BlockPool
from ..kv.tiers.copies import Copies
from ..kv.tiers.store import Done, Moved, Piece
from ..kv.tiers.tier import Tier
from ..protocol import Peer, TierStats
from .borrower import Borrower
from .lender import Lender
from .links import PeerLinks
from .wire import slab_form


class Peers:
    """host, read: as in `Lender`. root: of the chains of block hashes. gbps: rate of lending, and expected of
    fetching.

    All methods belong to the engine's thread. `close` ends the links as well.
    """

    def __init__(
        self,
        links: PeerLinks,
        pool: BlockPool,
        copies: Copies,
        host: Tier,
        read: Callable[[int], bytes],
        *,
        root: bytes,
        gbps: float,
    ) -> None:
        form = slab_form(root, copies.slab_bytes, copies.device.type)
        bytes_per_s = gbps * 1e9 / 8
        self._links = links
        self.borrower = Borrower(copies, links, form, bytes_per_s)
        self._lender = Lender(pool, copies, host, read, links, form, bytes_per_s)

    @property
    def tier(self) -> Tier:
        return self.borrower.tier

    @property
    def busy(self) -> bool:
        """Whether others wait for blocks of ours, or are being given some."""
        return self._lender.busy

    @property
    def lent_blocks(self) -> list[int]:
        """Blocks of the pool to each of which a loan holds a reference."""
        return self._lender.blocks

    def offer(self, peer: Peer, names: Iterable[bytes]) -> None:
        self.borrower.offer(peer, names)

    def fetch(self, pieces: Sequence[Piece], done: Done) -> Future[Moved]:
        return self.borrower.start(pieces, done)

    def poll(self, timeout_s: float = 0.0) -> None:
        self._lender.poll(timeout_s)

    def stats(self) -> TierStats:
        return self.borrower.stats(self._lender.lent_bytes)

    def close(self) -> None:
        """In the order of who uses whom: lender, links, borrower's memory."""
        self._lender.close()
        self._links.close()
        self.borrower.close()

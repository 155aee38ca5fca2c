"""Other workers' memory as one more tier: blocks that they are said to hold, and the way from there.

A block is offered with the request that names its holder, and restored like one from disk: into a block of
the pool, while others compute. What does not come, or not as it should, is a miss, and computed. Methods
belong to the engine's thread; slabs arrive in that of the links.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import msgspec
import numpy as np

from ..kv.tiers.copies import Copies, Fence
from ..kv.tiers.cost import Link
from ..kv.tiers.host_memory import HostMemory
from ..kv.tiers.slots import Slots
from ..kv.tiers.store import Done, Moved, Piece
from ..kv.tiers.tier import Tier
from ..protocol import Peer, TierStats
from .links import PeerLinks

# blocks that others are known to hold: enough for a few of the longest prompts
MOST_OFFERED = 16_384
# until it is measured: the owner sees a request between two of its steps
LATENCY_S = 0.01


class PeerTier(Tier):
    """Its slots hold nothing: each stands for a block that a peer is said to have."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__("peer", Slots(MOST_OFFERED), Link(LATENCY_S, bytes_per_s), None)
        self.keeps = False

    def discard_corrupt(self, name: bytes) -> None:
        """A block that did not come: its holder lost it, or is gone. Wrong checksums are counted apart."""
        self.discard(name)


class Borrower:
    """form: see `wire.slab_form`."""

    def __init__(self, copies: Copies, links: PeerLinks, form: str, bytes_per_s: float) -> None:
        self.tier = PeerTier(bytes_per_s)
        self._copies = copies
        self._links = links
        self._form = form
        self._stage = HostMemory(1, copies.slab_bytes, copies.device)
        self._endpoints: dict[int, str] = {}

    def offer(self, peer: Peer, names: Iterable[bytes]) -> None:
        """These blocks can be had from there, as far as is known."""
        tier = self.tier
        for name in names:
            entry = tier.slots.find(name)
            if entry is not None:
                tier.slots.touch(name)
            else:
                entry = tier.reserve(name)
                if entry is None:
                    return
                tier.filled([entry], 0)
            # the latest word counts: who had it before may be gone
            self._endpoints[entry.slot] = peer.endpoint

    def start(self, pieces: Sequence[Piece], done: Done) -> Future[Moved]:
        """Begin to fetch; as `Store.start`. What is asked for at once may come from several workers."""
        by_endpoint: dict[str, list[int]] = defaultdict(list)
        for index, piece in enumerate(pieces):
            by_endpoint[self._endpoints[piece.offer]].append(index)
        batch = _Batch(pieces, done)
        fence = self._copies.fence()
        for endpoint, indices in by_endpoint.items():
            names = [pieces[index].name for index in indices]
            self._links.fetch(endpoint, names, self._form, self._taker(batch, indices, fence))
        return batch.future

    def stats(self, lent_bytes: int) -> TierStats:
        return msgspec.structs.replace(
            self.tier.stats(), corrupt_blocks=self._links.corrupt, stored_bytes=lent_bytes
        )

    def close(self) -> None:
        """Once the links are closed."""
        self._stage.close()

    def _taker(
        self, batch: _Batch, indices: Sequence[int], fence: Fence
    ) -> Callable[[int, memoryview | None], None]:
        def take(position: int, slab: memoryview | None) -> None:
            index, arrived = indices[position], False
            try:
                if slab is not None and len(slab) == self._copies.slab_bytes:
                    stage = self._stage.slab(0)
                    np.copyto(stage.numpy(), np.frombuffer(slab, np.uint8))
                    self._copies.load([(batch.pieces[index].block, stage)], fence)
                    arrived = True
            finally:
                batch.settle(index, arrived=arrived)

        return take


class _Batch:
    """Blocks asked for together. `settle` is called by the thread of the links alone."""

    def __init__(self, pieces: Sequence[Piece], done: Done) -> None:
        self.pieces = pieces
        self.future: Future[Moved] = Future()
        # under way from now on: a block may be written at any time
        self.future.set_running_or_notify_cancel()
        self._done = done
        self._arrived = [False] * len(pieces)
        self._left = len(pieces)
        self._began = time.perf_counter()

    def settle(self, index: int, *, arrived: bool) -> None:
        self._arrived[index] = arrived
        self._left -= 1
        if not self._left:
            moved = Moved(self._arrived, self._began, time.perf_counter())
            self._done(moved)
            self.future.set_result(moved)

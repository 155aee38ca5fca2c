"""News of KV blocks on its way to the supervisor: coalesced, numbered, and safe to add to from any thread.

Knows what is held. While the supervisor does not take a message the news keeps merging; where too much of it
waits even so, it is replaced by what is held now, which bounds memory. Knows nothing of sockets.
"""

from __future__ import annotations

import threading
from itertools import islice

from .kv.hashing import split_hashes
from .protocol import KvEvents, Tier

# blocks of one message: 256 KiB of hashes
MAX_BLOCKS = 16_384
# removals that may wait for the supervisor, beside what is held
MAX_PENDING = 65_536


class KvJournal:
    """An EventSink. The last word on each block wins."""

    def __init__(self, max_pending: int = MAX_PENDING, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_pending = max_pending
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._seq = 0
        self._cleared = False
        self._held: dict[Tier, set[bytes]] = {}
        self._pending: dict[Tier, dict[bytes, bool]] = {}

    def kv_stored(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        with self._lock:
            self._held.setdefault(tier, set()).update(hashes)
            self._pending.setdefault(tier, {}).update(dict.fromkeys(hashes, True))

    def kv_removed(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        with self._lock:
            held = self._held.setdefault(tier, set())
            held.difference_update(hashes)
            blocks = self._pending.setdefault(tier, {})
            blocks.update(dict.fromkeys(hashes, False))
            if len(blocks) > len(held) + self._max_pending:
                self._tell_all()

    def kv_cleared(self) -> None:
        with self._lock:
            self._held.clear()
            self._tell_all()

    @property
    def pending(self) -> bool:
        return self._cleared or bool(self._pending)

    def take(self) -> KvEvents | None:
        """The next message, of one tier; None when there is no news. Hand it to `restore` if unsent."""
        with self._lock:
            if not self._pending and not self._cleared:
                return None
            tier: Tier = next(iter(self._pending), "gpu")
            waiting = self._pending.get(tier, {})
            blocks = dict(islice(waiting.items(), self._max_blocks))
            if len(blocks) == len(waiting):
                self._pending.pop(tier, None)
            else:
                for block in blocks:
                    del waiting[block]
            cleared, self._cleared = self._cleared, False
            self._seq += 1
        return KvEvents(
            seq=self._seq,
            tier=tier,
            cleared=cleared,
            stored=b"".join(block for block, held in blocks.items() if held),
            removed=b"".join(block for block, held in blocks.items() if not held),
        )

    def restore(self, unsent: KvEvents) -> None:
        """Put back the message taken last; what came since has the last word."""
        with self._lock:
            self._seq -= 1
            if self._cleared:
                return
            self._cleared = unsent.cleared
            blocks: dict[bytes, bool] = {}
            for packed, held in ((unsent.stored, True), (unsent.removed, False)):
                blocks.update(dict.fromkeys(split_hashes(packed), held))
            blocks.update(self._pending.get(unsent.tier, {}))
            self._pending[unsent.tier] = blocks

    def _tell_all(self) -> None:
        """Begin anew: nothing is held but what follows."""
        self._cleared = True
        self._pending = {tier: dict.fromkeys(held, True) for tier, held in self._held.items() if held}

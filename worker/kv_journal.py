"""News of KV blocks on its way to the supervisor: coalesced, numbered, and safe to add to from any thread.

While the supervisor does not take a message the news keeps merging, so that memory stays bounded by the
number of distinct blocks and nothing is lost. Knows nothing of sockets.
"""

from __future__ import annotations

import threading

from .kv.hashing import split_hashes
from .protocol import KvEvents, Tier


class KvJournal:
    """An EventSink. The last word on each block wins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seq = 0
        self._cleared = False
        self._pending: dict[Tier, dict[bytes, bool]] = {}

    def kv_stored(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        self._note(hashes, tier, held=True)

    def kv_removed(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        self._note(hashes, tier, held=False)

    def kv_cleared(self) -> None:
        with self._lock:
            self._cleared = True
            self._pending.clear()

    @property
    def pending(self) -> bool:
        return self._cleared or bool(self._pending)

    def take(self) -> KvEvents | None:
        """The next message, of one tier; None when there is no news. Hand it to `restore` if unsent."""
        with self._lock:
            if not self._pending and not self._cleared:
                return None
            tier: Tier = next(iter(self._pending), "gpu")
            blocks = self._pending.pop(tier, {})
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

    def _note(self, hashes: list[bytes], tier: Tier, *, held: bool) -> None:
        with self._lock:
            blocks = self._pending.setdefault(tier, {})
            for block in hashes:
                blocks[block] = held

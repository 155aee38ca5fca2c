"""Who hears what the directory tells."""

from __future__ import annotations

from typing import Protocol

from decodefleet.worker.protocol import Tier


class DirectoryListener(Protocol):
    """Called on the event loop. Repeated and unnecessary news must do no harm."""

    def on_stored(self, worker_id: str, incarnation: str, hashes: list[bytes], tier: Tier) -> None: ...

    def on_removed(self, worker_id: str, incarnation: str, hashes: list[bytes], tier: Tier) -> None: ...

    def on_cleared(self, worker_id: str, incarnation: str) -> None:
        """It holds nothing, as far as the directory knows."""
        ...

"""Lends blocks to other workers: looks them up, keeps them in place while they are copied out, lets them go.

A block in host memory is read there; one in the pool is copied out behind the steps that were submitted, in
a thread of its own, at no more than the rate it is given. No step waits for it. Methods belong to the
engine's thread. Knows nothing of sequences, and of sockets only whom to answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ..kv.block_pool import BlockPool
from ..kv.tiers.copies import Copies, Fence
from ..kv.tiers.host_memory import HostMemory
from ..kv.tiers.slots import Entry
from ..kv.tiers.tier import Tier
from .links import Asked, PeerLinks

log = logging.getLogger(__name__)

# blocks lent at once, unless a single request wants more
MOST_BLOCKS = 64
# without a pause that is this long, the clock of the rate limit goes on
BURST_S = 0.05


class _Loan(NamedTuple):
    """What is kept in place for one request. blocks: of the pool, by index; entries: of host memory."""

    asked: Asked
    blocks: dict[int, int]
    entries: dict[int, Entry]


class Lender:
    """host: the tier in host memory, and `read`, which copies the slab out of a slot of it."""

    def __init__(
        self,
        pool: BlockPool,
        copies: Copies,
        host: Tier,
        read: Callable[[int], bytes],
        links: PeerLinks,
        form: str,
        bytes_per_s: float,
    ) -> None:
        self.lent_bytes = 0
        self._pool = pool
        self._copies = copies
        self._host = host
        self._read = read
        self._links = links
        self._form = form
        self._bytes_per_s = bytes_per_s
        self._stage = HostMemory(1, copies.slab_bytes, copies.device)
        self._thread = ThreadPoolExecutor(1, "kv-lender")
        self._loans: list[_Loan] = []
        self._over: SimpleQueue[_Loan] = SimpleQueue()
        self._free_at = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._loans or self._links.asked)

    @property
    def blocks(self) -> list[int]:
        """Blocks of the pool to each of which a loan holds a reference."""
        return [block for loan in self._loans for block in loan.blocks.values()]

    def poll(self, timeout_s: float = 0.0) -> None:
        """Let go of what was copied, begin what there is room for; waits up to the timeout for the first."""
        while self._loans:
            try:
                self._end(self._over.get(block=timeout_s > 0, timeout=timeout_s or None))
            except Empty:
                break
            timeout_s = 0.0
        while self._links.asked and self._room(self._links.asked[0]):
            self._begin(self._links.asked.popleft())

    def close(self) -> None:
        """The thread ends; loans are let go of with the pool."""
        self._thread.shutdown(cancel_futures=True)
        self._stage.close()

    def _room(self, asked: Asked) -> bool:
        lent = sum(len(loan.blocks) for loan in self._loans)
        return not self._loans or lent + len(asked.fetch.each) <= MOST_BLOCKS

    def _begin(self, asked: Asked) -> None:
        loan = _Loan(asked, {}, {})
        for index, name in enumerate(asked.fetch.each if asked.fetch.form == self._form else ()):
            entry = self._host.slots.find(name)
            block = self._pool.find(name)
            if entry is not None:
                loan.entries[index] = self._host.slots.pin(entry)
            elif block is not None:
                loan.blocks[index] = block
        self._pool.share([*loan.blocks.values()])
        self._loans.append(loan)
        fence = self._copies.fence() if loan.blocks else None
        self._thread.submit(self._lend, loan, fence)

    def _end(self, loan: _Loan) -> None:
        self._loans.remove(loan)
        self._pool.release([*loan.blocks.values()])
        for entry in loan.entries.values():
            self._host.slots.unpin(entry)

    def _lend(self, loan: _Loan, fence: Fence) -> None:
        """In the lender's thread."""
        index, count = 0, len(loan.asked.fetch.each)
        try:
            for index in range(count):
                slab = self._slab(loan, index, fence)
                if slab is not None:
                    self._pace(len(slab))
                self._links.lend(loan.asked, index, slab)
        except Exception:
            log.exception("KV blocks that another worker asked for could not be lent")
            # whoever asked hears of other blocks meanwhile, and would not find out
            for left in range(index, count):
                self._links.lend(loan.asked, left, None)
        finally:
            self._over.put(loan)

    def _slab(self, loan: _Loan, index: int, fence: Fence) -> bytes | None:
        if index in loan.entries:
            return self._read(loan.entries[index].slot)
        if index not in loan.blocks:
            return None
        stage = self._stage.slab(0)
        self._copies.save([(loan.blocks[index], stage)], fence)
        return stage.numpy().tobytes()

    def _pace(self, size: int) -> None:
        """Sleeps as long as it takes for the bytes lent to keep to the rate."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_S) + size / self._bytes_per_s
        self.lent_bytes += size
        if self._free_at > now:
            time.sleep(self._free_at - now)

"""Publishes what one incarnation of a worker holds. Never blocks, never fails into its caller.

Knows the whole set of held blocks. While Redis is away only that set is kept up to date; when Redis returns,
or has lost what was written, the directory's entry is cleared and written anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from itertools import islice

from redis.exceptions import RedisError

from decodefleet.worker.kv.hashing import split_hashes
from decodefleet.worker.protocol import KvEvents

from ..tasks import end
from .keys import SEQ, Client, Holder, Keys, connect, delta_fields, letters, tier_bit

log = logging.getLogger(__name__)

# hashes per transaction: 64 KiB of them
CHUNK = 4096
MAX_DELTAS = 256
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_GOODBYE_S = 1.0


class _Lost(Exception):
    """Redis no longer has what was written to it."""


class DirectoryPublisher:
    """start, then `publish` each KvEvents of the worker in order, then stop, which withdraws the entry.

    lease_s: how long the entry outlives us when we die.
    """

    def __init__(
        self, redis_url: str, model: str, worker_id: str, incarnation: str, lease_s: float = 10.0
    ) -> None:
        self._url = redis_url
        self._holder = Holder(worker_id, incarnation)
        self._keys = Keys(model)
        self._lease_ms = int(lease_s * 1000)
        self._held: dict[bytes, int] = {}
        self._touched: dict[bytes, None] = {}
        self._rewrite = True
        self._seq = 0
        self._events_seq: int | None = None
        self._connected = False
        self._absence_noted = False
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether Redis has what we know, or is being told."""
        return self._connected

    @property
    def held(self) -> int:
        """Blocks held in any tier."""
        return len(self._held)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"directory publisher of {self._holder.member}")

    async def stop(self) -> None:
        """Idempotent; takes a second at most."""
        if self._task is not None:
            await end(self._task)
            self._task = None

    def publish(self, events: KvEvents) -> None:
        """Take in one message; stored blocks count after removed ones. Repeats change nothing."""
        gap = self._events_seq is not None and events.seq != self._events_seq + 1
        self._events_seq = events.seq
        if gap:
            # what we missed may be removals: rather know less than send requests to where nothing is
            log.warning("news of %s were lost before %d", self._holder.member, events.seq)
        if gap or events.cleared:
            self._held.clear()
            self._rewrite_all()
        bit = tier_bit(events.tier)
        for block in split_hashes(events.removed):
            self._set(block, self._held.get(block, 0) & ~bit)
        for block in split_hashes(events.stored):
            self._set(block, self._held.get(block, 0) | bit)
        self._news.set()

    def _set(self, block: bytes, tiers: int) -> None:
        if tiers:
            self._held[block] = tiers
        else:
            self._held.pop(block, None)
        if not self._rewrite:
            self._touched[block] = None

    def _rewrite_all(self) -> None:
        self._rewrite = True
        self._touched.clear()

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        client = connect(self._url)
        try:
            while True:
                try:
                    await self._write_pending(client)
                    await self._renew(client)
                    backoff = _FIRST_BACKOFF_S
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._lease_ms / 3000):
                            await self._news.wait()
                except _Lost:
                    self._rewrite_all()
                except (RedisError, OSError) as error:
                    self._note_absence(error)
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, _MAX_BACKOFF_S)
        finally:
            await self._withdraw(client)

    def _note_absence(self, error: Exception) -> None:
        if not self._absence_noted:
            log.warning("the prefix directory cannot be written: %s", error)
        self._absence_noted = True
        self._connected = False
        self._rewrite_all()

    async def _write_pending(self, client: Client) -> None:
        self._news.clear()
        if self._rewrite:
            self._rewrite = False
            self._touched = dict.fromkeys(self._held)
            await self._write(client, (), cleared=True)
        while self._touched:
            chunk = list(islice(self._touched, CHUNK))
            for block in chunk:
                del self._touched[block]
            await self._write(client, chunk)
        self._connected = True
        self._absence_noted = False

    async def _write(self, client: Client, chunk: Sequence[bytes], *, cleared: bool = False) -> None:
        """One transaction: hash, stream and lease change together."""
        self._seq += 1
        now = [(block, self._held.get(block, 0)) for block in chunk]
        stored = {block: letters(tiers) for block, tiers in now if tiers}
        gone = [block for block, tiers in now if not tiers]
        blocks, deltas = self._keys.blocks(self._holder), self._keys.deltas(self._holder)
        async with client.pipeline(transaction=True) as pipe:
            if cleared:
                pipe.delete(blocks).hset(blocks, SEQ, self._seq)
            else:
                pipe.hincrby(blocks, SEQ, 1)
            if stored:
                pipe.hset(blocks, mapping=stored)
            if gone:
                pipe.hdel(blocks, *gone)
            fields = delta_fields(self._seq, cleared, now)
            pipe.xadd(deltas, fields, maxlen=MAX_DELTAS, approximate=True)
            self._lease(pipe)
            results = await pipe.execute()
        if not cleared and results[0] != self._seq:
            raise _Lost

    async def _renew(self, client: Client) -> None:
        async with client.pipeline(transaction=True) as pipe:
            self._lease(pipe)
            results = await pipe.execute()
        if not results[0]:
            raise _Lost

    def _lease(self, pipe: Client) -> None:
        workers = self._keys.workers
        pipe.pexpire(self._keys.blocks(self._holder), self._lease_ms)
        pipe.pexpire(self._keys.deltas(self._holder), self._lease_ms)
        pipe.sadd(workers, self._holder.member)
        pipe.pexpire(workers, 10 * self._lease_ms)

    async def _withdraw(self, client: Client) -> None:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                async with client.pipeline(transaction=True) as pipe:
                    pipe.delete(self._keys.blocks(self._holder), self._keys.deltas(self._holder))
                    pipe.srem(self._keys.workers, self._holder.member)
                    await pipe.execute()
        with contextlib.suppress(RedisError, OSError):
            await client.aclose()

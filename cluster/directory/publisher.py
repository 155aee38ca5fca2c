"""Publishes what one incarnation of a worker holds. Never blocks, never fails into its caller.

Knows the whole set of held blocks. While Redis is away only that set is kept up to date; when Redis returns,
or has lost what was written, or another server has taken its place, the entry is written anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Any

from redis.exceptions import OutOfMemoryError, RedisError

from decodefleet.worker.kv.hashing import HASH_BYTES, split_hashes
from decodefleet.worker.protocol import KvEvents, Ready

from ..tasks import end
from .connection import Client, connect, hang_up
from .keys import RELOAD, SEQ, TIERS, Holder, Keys, delta_fields
from .slots import Slots, Write

log = logging.getLogger(__name__)

# changed blocks of one transaction: 16 KiB of hashes
CHUNK = 1024
# of deltas that are kept for readers; who is further behind reads all slots again
MAX_DELTA_BYTES = 512 << 10
# slots of one transaction when all is written anew: 136 KiB
_SPAN = 8192
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_FULL_BACKOFF_S = 20.0
_GOODBYE_S = 1.0


class _Lost(Exception):
    """Redis no longer has what was written to it."""


class Backlog:
    """Ids of the newest entries of a stream, whose values together have up to so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: deque[tuple[bytes, int]] = deque()

    @property
    def oldest(self) -> bytes:
        return self._entries[0][0] if self._entries else b"0"

    def add(self, entry_id: bytes, size: int) -> None:
        # the fields' names and the stream's own overhead, roughly
        size += 64
        self._entries.append((entry_id, size))
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._entries.popleft()[1]


class DirectoryPublisher:
    """start, then `publish` each KvEvents of the worker in order, then stop, which withdraws the entry.

    lease_s: how long the entry outlives us when we die. about: further fields for those who look at it.
    """

    def __init__(
        self,
        redis_url: str,
        model: str,
        worker_id: str,
        incarnation: str,
        lease_s: float = 10.0,
        about: Mapping[str, str | bytes | int] | None = None,
    ) -> None:
        self._url = redis_url
        self._holder = Holder(worker_id, incarnation)
        self._keys = Keys(model)
        self._lease_ms = int(lease_s * 1000)
        self._about = about or {}
        self._slots = Slots()
        self._rewrite = True
        self._seq = 0
        # length of the strings in Redis, in slots
        self._written = 0
        self._deltas = Backlog(MAX_DELTA_BYTES)
        self._events_seq: int | None = None
        self._connected = False
        # one of its own: jitter must not disturb who relies on the order of the global one
        self._random = Random()
        self._absence_noted = False
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of_worker(cls, redis_url: str, ready: Ready) -> DirectoryPublisher:
        """For a worker that is warm; says beside its blocks how prompts of its model are hashed."""
        card = ready.card
        about: dict[str, str | bytes | int] = {
            "folder": card.folder,
            "root": card.hash_root,
            "block_size": card.block_size,
        }
        return cls(redis_url, card.name, ready.worker_id, ready.incarnation, about=about)

    @property
    def connected(self) -> bool:
        """Whether Redis has what we know, or is being told."""
        return self._connected

    @property
    def held(self) -> int:
        """Blocks held in any tier."""
        return len(self._slots)

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
            self._slots = Slots()
            self._rewrite = True
        self._slots.put(split_hashes(events.removed), events.tier, held=False)
        self._slots.put(split_hashes(events.stored), events.tier, held=True)
        if self._rewrite:
            self._slots.restart()
        self._news.set()

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
                    continue
                except _Lost:
                    self._rewrite_all()
                    pause = _FIRST_BACKOFF_S
                except (RedisError, OSError) as error:
                    self._note_absence(error)
                    full = isinstance(error, OutOfMemoryError)
                    pause = _FULL_BACKOFF_S if full else backoff
                    backoff = min(2 * backoff, _MAX_BACKOFF_S)
                    await self._let_go(client, withdraw=full)
                # a fleet of workers must not come back all at once
                await asyncio.sleep(pause * self._random.uniform(0.5, 1.0))
        finally:
            await self._withdraw(client)
            await hang_up(client)

    def _note_absence(self, error: Exception) -> None:
        if not self._absence_noted:
            log.warning("the prefix directory cannot be written: %s", error)
        self._absence_noted = True
        self._connected = False
        self._rewrite_all()

    def _rewrite_all(self) -> None:
        self._rewrite = True
        self._slots.restart()

    async def _let_go(self, client: Client, *, withdraw: bool) -> None:
        """The next try looks for the server again: this one may be a master no more."""
        if withdraw:
            # an entry that cannot be kept true takes room from others
            await self._withdraw(client)
        await hang_up(client)

    async def _write_pending(self, client: Client) -> None:
        self._news.clear()
        while self._rewrite or self._slots.touched:
            if self._rewrite:
                await self._write_all(client)
            else:
                await self._write_changes(client)
        self._connected = True
        self._absence_noted = False

    async def _write_all(self, client: Client) -> None:
        """Readers hear of it at the end, and keep what they knew until then."""
        self._rewrite = False
        slots, holder = self._slots, self._holder
        self._seq += 1
        self._written = 0
        async with client.pipeline(transaction=True) as pipe:
            pipe.delete(*self._keys.leased(holder)[:3])
            about: dict[Any, Any] = {SEQ: self._seq, **self._about}
            pipe.hset(self._keys.about(holder), mapping=about)
            self._lease(pipe)
            await pipe.execute()
        for start in range(0, slots.size, _SPAN):
            if slots is not self._slots or self._rewrite:
                return
            hashes, tiers = slots.span(start, start + _SPAN)
            await self._transact(client, [hashes], [tiers])
        await self._transact(client, [], [], {RELOAD: 1})

    async def _write_changes(self, client: Client) -> None:
        changes = self._slots.take(CHUNK)
        await self._transact(
            client, changes.hashes, changes.tiers, delta_fields(self._seq + 1, changes.blocks)
        )

    async def _transact(
        self,
        client: Client,
        hashes: list[Write],
        tiers: list[Write],
        delta: dict[bytes, Any] | None = None,
    ) -> None:
        """Strings, stream, number and lease change together. Raises _Lost where Redis has lost something."""
        self._seq += 1
        holder, keys = self._holder, self._keys
        async with client.pipeline(transaction=True) as pipe:
            pipe.hincrby(keys.about(holder), SEQ, 1)
            for write in hashes:
                pipe.setrange(keys.blocks(holder), *write)
            for write in tiers:
                pipe.setrange(keys.tiers(holder), *write)
                self._written = max(self._written, write.offset + len(write.data))
            if delta is not None:
                fields = delta | {SEQ: self._seq}
                pipe.xadd(keys.deltas(holder), fields, minid=self._deltas.oldest, approximate=True)
            counts: dict[Any, Any] = {tier: self._slots.blocks_in(tier) for tier in TIERS}
            pipe.hset(keys.about(holder), mapping=counts)
            self._lease(pipe)
            results = await pipe.execute()
        number, *lengths = results[: 1 + len(hashes) + len(tiers)]
        if delta is not None:
            self._deltas.add(results[1 + len(lengths)], _size(delta))
        complete = not tiers or (
            lengths[-1] == self._written and lengths[len(hashes) - 1] == HASH_BYTES * self._written
        )
        if number != self._seq or not complete:
            raise _Lost

    async def _renew(self, client: Client) -> None:
        async with client.pipeline(transaction=True) as pipe:
            self._lease(pipe)
            about, blocks, tiers, *_ = await pipe.execute()
        if not about or (self._written and not (blocks and tiers)):
            raise _Lost

    def _lease(self, pipe: Client) -> None:
        workers = self._keys.workers
        for key in self._keys.leased(self._holder):
            pipe.pexpire(key, self._lease_ms)
        pipe.sadd(workers, self._holder.member)
        pipe.pexpire(workers, 10 * self._lease_ms)

    async def _withdraw(self, client: Client) -> None:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                # a server that is full takes no transactions
                async with client.pipeline(transaction=False) as pipe:
                    pipe.unlink(*self._keys.leased(self._holder))
                    pipe.srem(self._keys.workers, self._holder.member)
                    await pipe.execute()


def _size(delta: Mapping[bytes, Any]) -> int:
    return sum(len(value) for value in delta.values() if isinstance(value, bytes))

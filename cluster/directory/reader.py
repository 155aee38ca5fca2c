"""Follows what the workers of one model publish, and tells a listener. Never on the path of liveness.

Per worker incarnation: read its slots once, then follow its stream of deltas; a missing number, a worker that
wrote all anew, or the return of Redis means reading the slots again. While Redis is away the listener keeps
what it was told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress
from random import Random

from redis.exceptions import ReadOnlyError, RedisError

from decodefleet.worker.kv.hashing import split_hashes
from decodefleet.worker.protocol import Tier

from ..tasks import end
from .connection import Client, connect, hang_up
from .keys import RELOAD, SEQ, TIERS, Holder, Keys, delta_groups, select_table, tier_bit
from .listener import DirectoryListener
from .slot_reader import read_slots

log = logging.getLogger(__name__)

# slots read at once: what they hold is told in about a millisecond, so that the event loop goes on
_SPAN = 8192
_READ = 16
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_SELECT = {tier: select_table(tier) for tier in TIERS}


@dataclass(slots=True)
class _Follower:
    """Where we are in one worker's stream. position: None asks for its slots to be read again."""

    holder: Holder
    position: bytes | None = None
    seq: int = 0
    tiers: set[Tier] = field(default_factory=set)


class DirectoryReader:
    """refresh_s: how soon new workers and expired leases are noticed."""

    def __init__(self, redis_url: str, model: str, *, refresh_s: float = 1.0) -> None:
        self._gaps = 0
        self._url = redis_url
        self._keys = Keys(model)
        self._refresh_s = refresh_s
        self._followers: dict[Holder, _Follower] = {}
        self._connected = False
        # one of its own: jitter must not disturb who relies on the order of the global one
        self._random = Random()
        self._lag_s = 0.0
        self._refreshed = float("-inf")
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def lag_s(self) -> float:
        """Age of the last delta when it was applied, by Redis' clock against ours."""
        return self._lag_s

    @property
    def gaps(self) -> int:
        """How often deltas were missing, so that a worker's slots had to be read again."""
        return self._gaps

    async def start(self, listener: DirectoryListener) -> None:
        """Begins to follow; returns at once, whether Redis is there or not."""
        self._task = asyncio.create_task(self._run(listener), name="directory reader")

    async def stop(self) -> None:
        """Idempotent."""
        if self._task is not None:
            await end(self._task)
            self._task = None

    async def _run(self, listener: DirectoryListener) -> None:
        client = connect(self._url)
        backoff = _FIRST_BACKOFF_S
        try:
            while True:
                try:
                    await self._follow(client, listener)
                except Exception as error:
                    # whatever somebody wrote there must not end it for good
                    if self._connected:
                        known = isinstance(error, RedisError | OSError)
                        log.warning("the prefix directory cannot be read: %r", error, exc_info=not known)
                        backoff = _FIRST_BACKOFF_S
                    self._forget_positions()
                    await hang_up(client)
                    await asyncio.sleep(backoff * self._random.uniform(0.5, 1.0))
                    backoff = min(2 * backoff, _MAX_BACKOFF_S)
        finally:
            self._connected = False
            await hang_up(client)

    def _forget_positions(self) -> None:
        self._connected = False
        self._refreshed = float("-inf")
        for follower in self._followers.values():
            follower.position = None

    async def _follow(self, client: Client, listener: DirectoryListener) -> None:
        while True:
            if time.monotonic() - self._refreshed >= self._refresh_s:
                await self._refresh(client, listener)
            for follower in tuple(self._followers.values()):
                if follower.position is None:
                    await self._load(client, listener, follower)
            self._connected = True
            await self._read(client, listener)

    async def _refresh(self, client: Client, listener: DirectoryListener) -> None:
        """Find workers that came, and those whose lease is over."""
        members = [member.decode() for member in await client.smembers(self._keys.workers)]
        holders = [Holder.parse(member) for member in members]
        async with client.pipeline(transaction=False) as pipe:
            for holder in holders:
                pipe.exists(self._keys.about(holder))
            alive = await pipe.execute()
        live = {holder for holder, exists in zip(holders, alive, strict=True) if exists}
        expired = [holder.member for holder in holders if holder not in live]
        if expired:
            # housekeeping, which a replica leaves to its master
            with contextlib.suppress(ReadOnlyError):
                await client.srem(self._keys.workers, *expired)
        for holder in set(self._followers) - live:
            del self._followers[holder]
            listener.on_cleared(*holder)
        for holder in live - set(self._followers):
            self._followers[holder] = _Follower(holder)
        self._refreshed = time.monotonic()

    async def _load(self, client: Client, listener: DirectoryListener, follower: _Follower) -> None:
        """Read all of a worker's slots. Deltas that come meanwhile are applied again after it: no harm."""
        holder = follower.holder
        last = await client.xrevrange(self._keys.deltas(holder), count=1)
        position, seq = (last[0][0], int(last[0][1][SEQ])) if last else (b"0", 0)
        listener.on_cleared(*holder)
        follower.tiers.clear()
        async for masks, hashes in read_slots(client, self._keys, holder, _SPAN):
            for tier in TIERS:
                held = [*compress(hashes, masks.translate(_SELECT[tier]))]
                if held:
                    follower.tiers.add(tier)
                    listener.on_stored(*holder, held, tier)
        follower.position, follower.seq = position, seq

    async def _read(self, client: Client, listener: DirectoryListener) -> None:
        """Wait for deltas, until the next refresh at the latest."""
        left = max(0.001, self._refreshed + self._refresh_s - time.monotonic())
        streams = {self._keys.deltas(each.holder): each.position for each in self._followers.values()}
        if not streams:
            await asyncio.sleep(left)
            return
        by_stream = {self._keys.deltas(each.holder).encode(): each for each in self._followers.values()}
        for stream, entries in await client.xread(streams, count=_READ, block=max(1, int(left * 1000))):
            follower = by_stream[stream]
            for position, fields in entries:
                self._lag_s = max(0.0, time.time() - int(position.split(b"-")[0]) / 1000)
                if not self._apply(listener, follower, fields):
                    follower.position = None
                    break
                follower.position = position

    def _apply(self, listener: DirectoryListener, follower: _Follower, fields: Mapping[bytes, bytes]) -> bool:
        """False where the slots have to be read again."""
        seq, holder = int(fields[SEQ]), follower.holder
        if seq <= follower.seq:
            return True
        if RELOAD in fields:
            return False
        if seq != follower.seq + 1:
            self._gaps += 1
            return False
        follower.seq = seq
        for mask, packed in delta_groups(fields).items():
            hashes = split_hashes(packed)
            for tier in TIERS:
                if mask & tier_bit(tier):
                    follower.tiers.add(tier)
                    listener.on_stored(*holder, hashes, tier)
                elif tier in follower.tiers:
                    listener.on_removed(*holder, hashes, tier)
        return True

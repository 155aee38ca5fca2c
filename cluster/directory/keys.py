"""The directory's schema: key names and encodings in one place. Does no I/O.

    decodefleet:{model}:workers                     SET of "worker_id|incarnation"
    decodefleet:{model}:blocks:{worker}|{inc}       HASH block hash (16 bytes) -> tiers; and `seq`
    decodefleet:{model}:deltas:{worker}|{inc}       STREAM of changes

Tiers are one letter each (g, c, n: GPU, CPU, NVMe), a block in two tiers has two. `seq` in the hash is the
number of the last delta that the hash contains. A delta has `seq`, perhaps `cleared`, and per combination of
tiers the hashes that are now in exactly these, joined; `-` is for hashes that are in none any more.
Hash and stream live under a lease: a dead incarnation's keys expire by themselves, and its member of the set
is removed by a reader that finds them gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from decodefleet.worker.protocol import Tier

SEQ = b"seq"
CLEARED = b"cleared"
GONE = b"-"
LETTERS: dict[Tier, bytes] = {"gpu": b"g", "cpu": b"c", "nvme": b"n"}

_CONNECT_TIMEOUT_S = 2.0
_TIMEOUT_S = 5.0


class Holder(NamedTuple):
    """One life of one worker."""

    worker_id: str
    incarnation: str

    @property
    def member(self) -> str:
        return f"{self.worker_id}|{self.incarnation}"

    @classmethod
    def parse(cls, member: str) -> Holder:
        worker_id, _, incarnation = member.rpartition("|")
        return cls(worker_id, incarnation)


class Keys(NamedTuple):
    """Key names of one model."""

    model: str

    @property
    def workers(self) -> str:
        return f"decodefleet:{self.model}:workers"

    def blocks(self, holder: Holder) -> str:
        return f"decodefleet:{self.model}:blocks:{holder.member}"

    def deltas(self, holder: Holder) -> str:
        return f"decodefleet:{self.model}:deltas:{holder.member}"


def letters(tiers: int) -> bytes:
    """The tiers of a bitmask, `GONE` for none; bit i is the i-th tier of `LETTERS`."""
    return b"".join(letter for bit, letter in enumerate(LETTERS.values()) if tiers >> bit & 1) or GONE


def tier_bit(tier: Tier) -> int:
    return 1 << list(LETTERS).index(tier)


def delta_fields(seq: int, cleared: bool, blocks: Iterable[tuple[bytes, int]]) -> dict[bytes, Any]:
    """A stream entry from (hash, tiers bitmask) pairs."""
    groups: dict[bytes, list[bytes]] = {}
    for block, tiers in blocks:
        groups.setdefault(letters(tiers), []).append(block)
    fields: dict[bytes, Any] = {SEQ: seq}
    if cleared:
        fields[CLEARED] = 1
    return fields | {group: b"".join(hashes) for group, hashes in groups.items()}


def delta_groups(fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Of a stream entry: letters (or `GONE`) -> joined hashes."""
    return {group: packed for group, packed in fields.items() if group not in (SEQ, CLEARED)}


# the client's annotations leave open whether answers are text or bytes, and futures or values: we know
Client = Any


def connect(url: str) -> Client:
    """A lazily connecting client for redis://, rediss:// and unix:// addresses, which never tries twice.

    Retrying is the caller's, who knows what to repeat.
    """
    return Redis.from_url(
        url,
        protocol=2,
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        socket_timeout=_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )

"""The directory's schema: key names and encodings in one place. Does no I/O.

    decodefleet:2:{model}:workers                  SET of "worker_id|incarnation"
    decodefleet:2:{model}:about:{worker}|{inc}     HASH `seq`, blocks per tier, what makes hashes of prompts
    decodefleet:2:{model}:blocks:{worker}|{inc}    STRING 16 bytes a slot: the hash of the block in it
    decodefleet:2:{model}:tiers:{worker}|{inc}     STRING a byte a slot: bitmask of tiers, 0 where it is free
    decodefleet:2:{model}:deltas:{worker}|{inc}    STREAM of changes

The number in each name is the schema's: two versions of a rolling upgrade do not read each other's. Bit i of
a bitmask is the i-th of `TIERS`. A delta has its `seq` and per bitmask the hashes that are now in exactly
these tiers, joined; or it has `reload`, and slots have to be read anew. `seq` in `about` is the number of the
last change written, told in a delta or not. All but the set live under one lease: a dead incarnation's keys
expire by themselves, and its member of the set is removed by a reader that finds them gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from decodefleet.worker.protocol import Tier

SEQ = b"seq"
RELOAD = b"reload"
TIERS: tuple[Tier, ...] = ("gpu", "cpu", "nvme")
MASKS = range(1 << len(TIERS))
PREFIX = "decodefleet:2:"


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
        return f"{PREFIX}{self.model}:workers"

    def about(self, holder: Holder) -> str:
        return f"{PREFIX}{self.model}:about:{holder.member}"

    def blocks(self, holder: Holder) -> str:
        return f"{PREFIX}{self.model}:blocks:{holder.member}"

    def tiers(self, holder: Holder) -> str:
        return f"{PREFIX}{self.model}:tiers:{holder.member}"

    def deltas(self, holder: Holder) -> str:
        return f"{PREFIX}{self.model}:deltas:{holder.member}"

    def leased(self, holder: Holder) -> tuple[str, str, str, str]:
        return self.about(holder), self.blocks(holder), self.tiers(holder), self.deltas(holder)


def tier_bit(tier: Tier) -> int:
    return 1 << TIERS.index(tier)


def delta_fields(seq: int, blocks: Iterable[tuple[bytes, int]]) -> dict[bytes, Any]:
    """A stream entry from (hash, tiers bitmask) pairs."""
    groups: dict[bytes, list[bytes]] = {}
    for block, tiers in blocks:
        groups.setdefault(b"%d" % tiers, []).append(block)
    return {SEQ: seq, **{group: b"".join(hashes) for group, hashes in groups.items()}}


def delta_groups(fields: Mapping[bytes, bytes]) -> dict[int, bytes]:
    """Of a stream entry: tiers bitmask -> joined hashes."""
    return {int(group): packed for group, packed in fields.items() if group.isdigit()}


def select_table(tier: Tier) -> bytes:
    """For `bytes.translate`: 1 for each bitmask that has the tier, else 0."""
    bit = tier_bit(tier)
    return bytes(int(mask & bit > 0) for mask in range(256))

"""Reads a worker's slots out of Redis, a span at a time: which blocks it holds, and in which tiers."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator

from decodefleet.worker.kv.hashing import HASH_BYTES

from .connection import Client
from .keys import Holder, Keys


async def read_slots(
    client: Client, keys: Keys, holder: Holder, span: int
) -> AsyncIterator[tuple[bytes, tuple[bytes, ...]]]:
    """(a mask of tiers each, as bytes; the hash of each) for up to `span` slots, to the last of them."""
    start, more = 0, True
    while more:
        async with client.pipeline(transaction=False) as pipe:
            pipe.getrange(keys.tiers(holder), start, start + span - 1)
            pipe.getrange(keys.blocks(holder), HASH_BYTES * start, HASH_BYTES * (start + span) - 1)
            masks, packed = await pipe.execute()
        # strings that are being lost may be of unlike length for a moment
        count = min(len(masks), len(packed) // HASH_BYTES)
        yield masks[:count], struct.unpack_from(f"{HASH_BYTES}s" * count, packed)
        start, more = start + span, len(masks) == span

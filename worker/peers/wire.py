"""What workers say to each other: blocks are asked for by name, and come as checked slabs. Torch-free.

A Fetch is one frame; each of its blocks is answered by a Slab, whose second frame is the slab itself, or by a
Slab without one where the block is not to be had.
"""

from __future__ import annotations

from zlib import crc32

from ..kv.hashing import HASH_BYTES, split_hashes
from ..protocol import Message

# names of one Fetch: few, so that none waits long for another
MOST_NAMES = 16


class Fetch(Message, frozen=True, kw_only=True, omit_defaults=True):
    """ticket: of the asker, told back. names: of blocks, joined.

    form: what makes slabs of one name the same bytes beyond the name itself (`slab_form`).
    """

    ticket: int
    names: bytes
    form: str

    @property
    def each(self) -> list[bytes]:
        return split_hashes(self.names)

    @property
    def sound(self) -> bool:
        return len(self.names) % HASH_BYTES == 0 and 0 < len(self.names) <= MOST_NAMES * HASH_BYTES


class Slab(Message, frozen=True, kw_only=True, omit_defaults=True):
    """index: of the name in its Fetch. checksum: of name and slab; None where there is none."""

    ticket: int
    index: int
    checksum: int | None = None


def slab_form(root: bytes, slab_bytes: int, device: str) -> str:
    """Names say what was computed; on what kind of device, and how much of it a slab has, they do not."""
    return f"{root.hex()} {slab_bytes} {device}"


def checksum(name: bytes, slab: bytes | memoryview) -> int:
    return crc32(slab, crc32(name))

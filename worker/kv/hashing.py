"""The block hash: one definition for routers, workers and the prefix directory. Torch-free.

A full block's hash is BLAKE2b-128 over (parent hash, its token ids). The chain starts at a root that mixes
in everything that makes two KV caches different: model content, weight quantisation, block size, KV dtype,
layout version and attention window (`hash_root`), then adapter and tenant salt (`request_root`). A hash thus
names one content in one form, and equal hashes are interchangeable on every worker. The chain names the
blocks of KV group 0; those of other groups are named after them (`group_hash`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

HASH_BYTES = 16
LAYOUT_VERSION = 1
TOKEN_CODE = "I"
assert array(TOKEN_CODE).itemsize == 4


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, the form in which they are hashed and sent."""
    packed = array(TOKEN_CODE, tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    tokens = array(TOKEN_CODE)
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def hash_root(
    *, fingerprint: str, quantization: str, block_size: int, kv_dtype: str, attention: str = ""
) -> bytes:
    """Root of every chain of one model in one KV form.

    fingerprint: content hash of the model folder (`assets.fingerprint`), not its name.
    attention: how it differs from the model's own, which decides what deeper layers' KV is.
    """
    fields = (fingerprint, quantization, str(block_size), kv_dtype, str(LAYOUT_VERSION), attention)
    return _digest(b"root", *(field.encode() for field in fields))


def group_hash(block_hash: bytes, group: int) -> bytes:
    """Name of the block of KV group `group` that holds the tokens which `block_hash` names.

    The hash under a mask of the group's own: blocks of two groups have one name only if their hashes differ
    by just the masks, which is as hard to arrange as a collision. A tenth of the time of hashing again.
    """
    if not group:
        return block_hash
    return (int.from_bytes(block_hash) ^ _group_mask(group)).to_bytes(HASH_BYTES)


@cache
def _group_mask(group: int) -> int:
    return int.from_bytes(_digest(b"kv group", str(group).encode()))


def request_root(root: bytes, *, adapter: str = "", cache_salt: str = "") -> bytes:
    """Root of one request's chain: tenants with different salts never share a block."""
    if not adapter and not cache_salt:
        return root
    return _digest(b"request", root, adapter.encode(), cache_salt.encode())


def extend_chain(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `tokens`, the first one chained to `parent`."""
    packed = pack_tokens(tokens)
    stride = 4 * block_size
    hashes = []
    for start in range(0, len(packed) - stride + 1, stride):
        parent = blake2b(parent + packed[start : start + stride], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def split_hashes(packed: bytes) -> list[bytes]:
    """Inverse of `b"".join(hashes)`."""
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def _digest(*fields: bytes) -> bytes:
    """Digest of length-prefixed fields, so that no two field lists run together."""
    state = blake2b(digest_size=HASH_BYTES)
    for field in fields:
        state.update(len(field).to_bytes(4, "little"))
        state.update(field)
    return state.digest()

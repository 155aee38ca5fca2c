"""A trace as the simulator takes it: when which prompt comes, as a chain of block hashes, what it asks for.

Chains name contents as real ones do: equal prefixes have equal names. Reading files is `bench.traces`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from decodefleet.worker.kv.hashing import HASH_BYTES

from ..bench.workload import Request


class Arrival(NamedTuple):
    """at: seconds after the start. chain: hashes of the prompt's full blocks, packed as in `Place`."""

    at: float
    prompt_tokens: int
    output_tokens: int
    chain: bytes


class Chains:
    """Names of blocks from the segments of prompts; each distinct segment behind a prefix is hashed once.

    Segments but the last must be whole blocks long, as those of traces are.
    """

    def __init__(self, block_size: int, population: int = 0) -> None:
        self._size = block_size
        self._root = blake2b(b"%d" % population, digest_size=HASH_BYTES).digest()
        self._known: dict[tuple[bytes, str, int], bytes] = {}

    def of(self, request: Request) -> bytes:
        parent, parts = self._root, []
        for segment in request.segments:
            blocks = segment.length // self._size
            if not blocks:
                break
            part = self._part(parent, segment.key, blocks)
            parts.append(part)
            parent = part[-HASH_BYTES:]
        return b"".join(parts)

    def _part(self, parent: bytes, key: str, blocks: int) -> bytes:
        known = self._known.get((parent, key, blocks))
        if known is None:
            name = key.encode()
            hashes, block = [], parent
            for _ in range(blocks):
                block = blake2b(block + name, digest_size=HASH_BYTES).digest()
                hashes.append(block)
            known = b"".join(hashes)
            self._known[parent, key, blocks] = known
        return known


def arrivals(requests: Sequence[Request], block_size: int, *, shared: bool, copies: int = 1) -> list[Arrival]:
    """In order of time. shared: whether prompts have anything in common; if not they get no chains.

    copies: so many populations of users with nothing in common, each a shifted share of the span later.
    """
    times = [request.at or 0.0 for request in requests]
    start, end = min(times), max(times)
    span = end - start
    found: list[Arrival] = []
    for copy in range(copies):
        chains = Chains(block_size, copy)
        shift = span * copy / copies
        for request, time in zip(requests, times, strict=True):
            at = time + shift
            found.append(
                Arrival(
                    at - span if at > end else at,
                    request.input_len,
                    request.output_len,
                    chains.of(request) if shared else b"",
                )
            )
    found.sort(key=lambda arrival: arrival.at)
    return found

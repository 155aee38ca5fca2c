"""The longest cached prefix of a sequence over all KV groups. Looks, and takes nothing.

A group that sees everything needs each block of the prefix. One with a window needs those that the first
token behind the prefix sees: the last of the window, and the sinks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..sequence import BlockList
from .block_pool import BlockPool
from .groups import WindowRule
from .hashing import group_hash


def find_prefix(
    pool: BlockPool, rules: Sequence[WindowRule], hashes: Sequence[bytes], block_size: int
) -> list[BlockList]:
    """rules: of each group. hashes: those the prefix may consist of. All lists are of the prefix's length."""
    end, full = len(hashes), {}
    for g, rule in enumerate(rules):
        if rule.window is None:
            full[g] = _leading(pool, g, hashes[:end])
            end = len(full[g])
    sliding = [(g, rule) for g, rule in enumerate(rules) if rule.window is not None]
    # a shorter prefix moves the windows of other groups, maybe onto blocks that are not there
    settled = not sliding
    while not settled:
        before = end
        for g, rule in sliding:
            end = _window_end(pool, g, rule, hashes, end, block_size)
        settled = end == before
    return [
        BlockList(full[g][:end]) if g in full else _window(pool, g, rule, hashes[:end], block_size)
        for g, rule in enumerate(rules)
    ]


def _leading(pool: BlockPool, group: int, hashes: Sequence[bytes]) -> list[int]:
    """Blocks from the first on, as far as they are there."""
    blocks = []
    for block_hash in hashes:
        block = pool.find(group_hash(block_hash, group))
        if block is None:
            break
        blocks.append(block)
    return blocks


def _window_end(
    pool: BlockPool, group: int, rule: WindowRule, hashes: Sequence[bytes], end: int, block_size: int
) -> int:
    """The longest prefix of `end` blocks at most for which this group has what it needs."""
    sinks = hashes[: -(-rule.sinks // block_size)]
    leading = len(_leading(pool, group, sinks))
    if leading < len(sinks):
        end = min(end, leading)
    i = end - 1
    while i >= rule.first_seen(end * block_size) // block_size:
        if pool.find(group_hash(hashes[i], group)) is None:
            end = i
        i -= 1
    return end


def _window(
    pool: BlockPool, group: int, rule: WindowRule, hashes: Sequence[bytes], block_size: int
) -> BlockList:
    slid = rule.first_seen(len(hashes) * block_size) // block_size
    sinks = -(-rule.sinks // block_size)
    ids = [
        pool.find(group_hash(block_hash, group)) if i < sinks or i >= slid else pool.scratch
        for i, block_hash in enumerate(hashes)
    ]
    return BlockList([block for block in ids if block is not None], slid)

"""The longest prefix of a sequence whose blocks are there, over all KV groups. Looks, and takes nothing.

A group that sees everything needs each block of the prefix. One with a window needs those that the first
token behind the prefix sees: the last of the window, and the sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .groups import WindowRule
from .hashing import group_hash

P = TypeVar("P")


@dataclass(frozen=True)
class Places(Generic[P]):
    """Where the blocks of one group are. slid: entries from the sinks' on to here stand for none."""

    each: list[P]
    slid: int = 0


def find_prefix(
    find: Callable[[bytes], P | None],
    nowhere: P,
    rules: Sequence[WindowRule],
    hashes: Sequence[bytes],
    block_size: int,
) -> list[Places[P]]:
    """rules: of each group. hashes: those the prefix may consist of. All lists are of the prefix's length.

    find: where the block of this name is. nowhere: stands for a block that slid out of its window.
    """
    end, full = len(hashes), {}
    for g, rule in enumerate(rules):
        if rule.window is None:
            full[g] = _leading(find, g, hashes[:end])
            end = len(full[g])
    sliding = [(g, rule) for g, rule in enumerate(rules) if rule.window is not None]
    # a shorter prefix moves the windows of other groups, maybe onto blocks that are not there
    settled = not sliding
    while not settled:
        before = end
        for g, rule in sliding:
            end = _window_end(find, g, rule, hashes, end, block_size)
        settled = end == before
    return [
        Places(full[g][:end]) if g in full else _window(find, nowhere, g, rule, hashes[:end], block_size)
        for g, rule in enumerate(rules)
    ]


def _leading(find: Callable[[bytes], P | None], group: int, hashes: Sequence[bytes]) -> list[P]:
    """Places of blocks from the first on, as far as they are there."""
    places = []
    for block_hash in hashes:
        place = find(group_hash(block_hash, group))
        if place is None:
            break
        places.append(place)
    return places


def _window_end(
    find: Callable[[bytes], P | None],
    group: int,
    rule: WindowRule,
    hashes: Sequence[bytes],
    end: int,
    block_size: int,
) -> int:
    """The longest prefix of `end` blocks at most for which this group has what it needs."""
    sinks = hashes[: -(-rule.sinks // block_size)]
    leading = len(_leading(find, group, sinks))
    if leading < len(sinks):
        end = min(end, leading)
    i = end - 1
    while i >= rule.first_seen(end * block_size) // block_size:
        if find(group_hash(hashes[i], group)) is None:
            end = i
        i -= 1
    return end


def _window(
    find: Callable[[bytes], P | None],
    nowhere: P,
    group: int,
    rule: WindowRule,
    hashes: Sequence[bytes],
    block_size: int,
) -> Places[P]:
    slid = rule.first_seen(len(hashes) * block_size) // block_size
    sinks = -(-rule.sinks // block_size)
    places = [
        find(group_hash(block_hash, group)) if i < sinks or i >= slid else nowhere
        for i, block_hash in enumerate(hashes)
    ]
    return Places([place for place in places if place is not None], slid)

"""KV groups: layers with one window rule, all groups with as many layers, so that a block of any group is one
page of the same pool. Torch-free arithmetic: which layer lies where, and how many blocks tokens need.

A layer that sees all of the past keeps all blocks of a sequence; one that sees a window gives back what slid
out of it. Knows nothing of sequences, pools or tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# each group has a block table in every step
MAX_GROUPS = 8


@dataclass(frozen=True, slots=True)
class WindowRule:
    """What a token sees: the last `window` tokens, its own included (None: all), and the first `sinks`."""

    window: int | None = None
    sinks: int = 0

    def first_seen(self, position: int) -> int:
        """The first token, sinks aside, that one at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def most_blocks(self, tokens: int, block_size: int, chunk: int) -> int:
        """Blocks that `tokens` tokens hold at most, while they are computed in chunks of up to `chunk`."""
        blocks = -(-tokens // block_size)
        if self.window is None:
            return blocks
        # a span of tokens may begin and end in the middle of a block
        live = -(-(self.window - 1 + chunk) // block_size) + 1
        return min(blocks, -(-self.sinks // block_size) + live)


FULL = WindowRule()


@dataclass(frozen=True, slots=True)
class KvGroup:
    """layers: their numbers in the model, in order of their place in the group's blocks."""

    rule: WindowRule
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KvGroups:
    """block_layers: layers in a block; the last group of a rule may leave some of its places empty.

    Where any layer sees everything, group 0 is of such.
    """

    groups: tuple[KvGroup, ...]
    block_layers: int

    @staticmethod
    def of(rules: Sequence[WindowRule]) -> KvGroups:
        """rules: of each layer."""
        layers_of: dict[WindowRule, list[int]] = {FULL: []}
        for layer, rule in enumerate(rules):
            layers_of.setdefault(rule, []).append(layer)
        size = _group_size([len(layers) for layers in layers_of.values() if layers])
        groups = [
            KvGroup(rule, tuple(layers[first : first + size]))
            for rule, layers in layers_of.items()
            for first in range(0, len(layers), size)
        ]
        return KvGroups(tuple(groups), size)

    def __len__(self) -> int:
        return len(self.groups)

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Of each layer: its group, and its place in that group's blocks."""
        return {
            layer: (g, place)
            for g, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }

    def rule_of(self, layer: int) -> WindowRule:
        return self.groups[self.places[layer][0]].rule

    def most_blocks(self, tokens: int, block_size: int, chunk: int) -> int:
        """Blocks of all groups that a sequence of `tokens` tokens holds at most."""
        return sum(group.rule.most_blocks(tokens, block_size, chunk) for group in self.groups)

    def most_tokens(self, blocks: int, block_size: int, chunk: int, limit: int) -> int:
        """The longest sequence, of `limit` tokens at most, that `blocks` blocks are always enough for."""
        lengths = range(block_size, limit + block_size, block_size)
        fitting = bisect_right(lengths, blocks, key=lambda n: self.most_blocks(n, block_size, chunk))
        return min(fitting * block_size, limit)


def _group_size(counts: Sequence[int]) -> int:
    """Layers per group for so many layers of each rule: least padding, then fewest groups."""

    def groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    sizes = [size for size in range(1, max(counts) + 1) if groups(size) <= max(MAX_GROUPS, len(counts))]
    return min(sizes, key=lambda size: (groups(size) * size, groups(size)))


PLAIN = KvGroups.of([FULL])

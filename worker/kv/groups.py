"""KV groups: layers with one window rule, all groups with as many layers, so that a block of any group is one
page of the same pool. Torch-free arithmetic: which layer lies where, and how many blocks tokens need.

A layer that sees all of the past keeps all blocks of a sequence; one that sees a window gives back what slid
out of it, and in time its list of blocks drops their entries. So a group counts the tokens it lists in a
frame of its own: frame 0 has all of a sequence's tokens, that of a window leaves out what was dropped.
Knows nothing of sequences, pools or tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

# each group has a block table in every step
MAX_GROUPS = 8
# lists drop entries for so many tokens at a time: kernels split keys at multiples of this or of less, so a
# token meets the same keys in the same splits whatever was dropped before them
DROPPED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class WindowRule:
    """What a token sees: the last `window` tokens, its own included (None: all), and the first `sinks`."""

    window: int | None = None
    sinks: int = 0

    def first_seen(self, position: int) -> int:
        """The first token, sinks aside, that one at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def most_seen(self, context: int) -> int:
        return context if self.window is None else min(context, self.sinks + self.window)

    def most_blocks(self, tokens: int, block_size: int, chunk: int) -> int:
        """Blocks that `tokens` tokens hold at most, while they are computed in chunks of up to `chunk`."""
        blocks = -(-tokens // block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-self.sinks // block_size) + _spanned(self.window - 1 + chunk, block_size))

    def kept_entries(self, block_size: int) -> int:
        """Entries at the front of a list that are never dropped: those of the sinks, in whole units."""
        unit = drop_unit(block_size)
        return -(-self.sinks // (unit * block_size)) * unit

    def most_entries(self, tokens: int, block_size: int, chunk: int) -> int:
        """Of a list of blocks: those held, and those that have still to be dropped."""
        blocks = -(-tokens // block_size)
        if self.window is None:
            return blocks
        behind = drop_unit(block_size) - 1 + _spanned(self.window - 1 + chunk, block_size)
        return min(blocks, self.kept_entries(block_size) + behind)


def _spanned(tokens: int, block_size: int) -> int:
    """Blocks that so many tokens in a row touch at most: the first may lie in the middle of its block."""
    return -(-tokens // block_size) + 1


def drop_unit(block_size: int) -> int:
    """Blocks whose entries are dropped together."""
    return lcm(DROPPED_TOKENS, block_size) // block_size


FULL = WindowRule()


def layer_rules(windows: Sequence[int | None], window: int | None = None, sinks: int = 0) -> list[WindowRule]:
    """Of each layer, by the model's own windows and, if there is one, a window for those that see farther."""
    return [
        WindowRule(own)
        if window is None or (own is not None and own <= window)
        else WindowRule(window, sinks)
        for own in windows
    ]


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

    @cached_property
    def frames(self) -> tuple[int, ...]:
        """Of each group, its frame: 0 without a window, else one that groups of the same rule share."""
        rules = [FULL, *dict.fromkeys(group.rule for group in self.groups if group.rule != FULL)]
        return tuple(rules.index(group.rule) for group in self.groups)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """Of each frame but frame 0, the first group in it."""
        return tuple(self.frames.index(frame) for frame in range(1, max(self.frames) + 1))

    @property
    def sink_span(self) -> int | None:
        """Tokens that a layer with sinks sees at once, None where none has any."""
        rules = [group.rule for group in self.groups if group.rule.sinks and group.rule.window]
        return rules[0].sinks + (rules[0].window or 0) if rules else None

    def rule_of(self, layer: int) -> WindowRule:
        return self.groups[self.places[layer][0]].rule

    def tokens_read(self, context: int) -> int:
        """Tokens that one behind `context` others reads, on average over the layers."""
        if len(self.groups) == 1 and self.groups[0].rule is FULL:
            return context
        read = sum(len(group.layers) * group.rule.most_seen(context) for group in self.groups)
        return read // len(self.places)

    def most_entries(self, tokens: int, block_size: int, chunk: int) -> tuple[int, ...]:
        """Of each group, in a list of blocks."""
        return tuple(group.rule.most_entries(tokens, block_size, chunk) for group in self.groups)

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

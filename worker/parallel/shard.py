"""Which part of a model a rank holds: heads by KV group, MLPs and vocabulary in spans.

With more ranks than KV heads, neighbouring ranks hold the same KV head, and queries of that head's group.
Torch-free arithmetic; knows nothing of processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError
from ..assets.plan import kv_heads_per_rank


@dataclass(frozen=True, slots=True)
class Part:
    """Of a tensor: along `axis`, of `whole` entries those from `start` to `stop`."""

    axis: int
    start: int
    stop: int
    whole: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. kv_parts: how many different sets of KV heads there are among the ranks.

    Parts are None where a rank holds the whole.
    """

    rank: int = 0
    size: int = 1
    kv_parts: int = 1

    @staticmethod
    def of(info: ModelInfo, rank: int, size: int) -> Shard:
        """Raises ModelError where the model cannot be divided so."""
        kv_heads_per_rank(info, size)
        if info.intermediate_size % size:
            raise ModelError(
                f"An MLP of {info.intermediate_size} numbers cannot be divided among {size} ranks.",
                "Choose a tensor-parallel size that divides it.",
            )
        return Shard(rank, size, min(info.kv_heads, size))

    def view(self, info: ModelInfo) -> ModelInfo:
        """The model as this rank sees it: its own heads and its own part of each MLP."""
        if self.size == 1:
            return info
        return replace(
            info,
            heads=info.heads // self.size,
            kv_heads=kv_heads_per_rank(info, self.size),
            intermediate_size=info.intermediate_size // self.size,
        )

    def part(self, axis: int, width: int) -> Part | None:
        """The rank's own of what all hold `width` entries of."""
        return _part(axis, width, self.rank, self.size)

    def kv_part(self, axis: int, width: int) -> Part | None:
        """The rank's own of what belongs to KV heads."""
        return _part(axis, width, self.rank * self.kv_parts // self.size, self.kv_parts)

    def vocabulary(self, tokens: int) -> Part | None:
        """The rank's rows of a table with one for each token; the last rank may have fewer than others."""
        if self.size == 1:
            return None
        width = self.most_tokens(tokens)
        return Part(0, min(self.rank * width, tokens), min((self.rank + 1) * width, tokens), tokens)

    def most_tokens(self, tokens: int) -> int:
        """Rows of such a table that a rank has at most."""
        return -(-tokens // self.size)


def _part(axis: int, width: int, index: int, count: int) -> Part | None:
    return None if count == 1 else Part(axis, index * width, (index + 1) * width, count * width)

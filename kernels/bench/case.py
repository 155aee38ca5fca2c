"""What a case of the benchmark is. Data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Work:
    """One set of inputs: the operation, its plain reference, and other people's implementations by name."""

    run: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """moved: bytes; make: fresh inputs on each call."""

    kernel: str
    variant: str
    moved: int
    flops: int
    make: Callable[[], Work]


@dataclass(frozen=True)
class Model:
    """Sizes of one model's layers, and the rows of a decode step to try."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rows: tuple[int, ...]

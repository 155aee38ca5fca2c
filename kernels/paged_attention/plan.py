"""How a launch of attention is cut up: tiles by shape, splits by how much there is to read. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..launch import Chip
from ..tuning import Params, params
from .metadata import AttentionMetadata

MAX_DECODE_QUERY = 8
# keys per split in batch-invariant mode: part of the numerics, so the same for every chip, batch and length
INVARIANT_SPLIT = 512
# splits are multiples of this many keys otherwise
SPLIT_STEP = 128
MAX_SPLITS = 128
# programs of decode that share a multiprocessor, by the tuning table's tiles
RESIDENT = 2
# what a program costs besides its keys, and what the second launch costs, in keys of one program
PROGRAM_KEYS = 96
MERGE_KEYS = 128
MERGE_KEYS_PER_SPLIT = 4


@dataclass(frozen=True)
class Phases:
    """The first `decodes` sequences are split over their keys, with at most `query` new tokens each."""

    decodes: int
    query: int


@dataclass(frozen=True)
class Tiles:
    """BLOCK_M rows per tile, `row_tiles` of them per KV head and sequence, and the launch's parameters."""

    block_m: int
    row_tiles: int
    params: Params


@dataclass(frozen=True)
class Splits:
    """`count` programs per sequence and tile; see `decode.spans` for what `tokens` means."""

    count: int
    tokens: int


def plan_phases(meta: AttentionMetadata, sequences: int) -> Phases:
    """Steps without prefill chunks are all decode; otherwise what the step says of itself."""
    if meta.max_query <= MAX_DECODE_QUERY:
        return Phases(sequences, meta.max_query)
    return Phases(meta.decodes, meta.decode_query)


def plan_tiles(rows: int, head_dim: int, *, kind: str, chip: Chip) -> Tiles:
    """rows: query heads that share a KV head, times tokens. kind: decode, prefill or invariant.

    In batch-invariant mode decode and prefill must do the same arithmetic, so both take the same tiles.
    """
    width = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    chosen = params("paged_attention", f"{kind}/{width}", chip)
    block_m = chosen.blocks["BLOCK_M"]
    if kind == "decode":
        block_m = min(block_m, max(16, 1 << (rows - 1).bit_length()))
    return Tiles(block_m, _cdiv(rows, block_m), chosen)


def plan_splits(
    *, programs: int, keys: int, windowed: bool, multiprocessors: int, resident: int, invariant: bool
) -> Splits:
    """programs: sequences × KV heads × row tiles. keys: most that one sequence reads. resident: programs per
    multiprocessor at once.

    Programs that run at once share the bandwidth evenly, so time counts in rounds of full multiprocessors;
    the number of splits that needs least of it is taken, the smallest of equals.
    """
    if invariant:
        # a window may begin in the middle of a split
        return Splits(max(1, _cdiv(keys, INVARIANT_SPLIT)) + windowed, INVARIANT_SPLIT)
    slots = multiprocessors * resident

    def cost(splits: int) -> float:
        tokens = _cdiv(_cdiv(keys, splits), SPLIT_STEP) * SPLIT_STEP
        rounds = _cdiv(programs * splits, slots)
        merge = MERGE_KEYS + MERGE_KEYS_PER_SPLIT * splits if splits > 1 else 0
        return rounds * (tokens + PROGRAM_KEYS) + merge

    most = min(MAX_SPLITS, max(1, _cdiv(keys, SPLIT_STEP)))
    return Splits(min(range(1, most + 1), key=cost), SPLIT_STEP)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)

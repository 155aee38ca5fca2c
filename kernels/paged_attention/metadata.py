"""What attention must know of a step, built once and used by every layer. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's sequences; T tokens in all, B sequences, their new tokens side by side.

    query_start_B1: int32 [B+1], where each sequence's tokens begin in the flat batch.
    context_B: int32 [B], tokens in the cache once this step's are written.
    block_table_BM: int32 [B, M], block ids in order; the padding repeats a valid id.
    positions_T: int64 [T], each token's position; a token sees keys at positions ≤ its own.
    slots_T: int64 [T], where each token's key and value go.
    max_query, max_context: of the above, as host integers.
    """

    query_start_B1: Tensor
    context_B: Tensor
    block_table_BM: Tensor
    positions_T: Tensor
    slots_T: Tensor
    max_query: int
    max_context: int

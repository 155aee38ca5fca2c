"""What attention must know of a step and of a layer, built once and used by every call. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's sequences; T tokens in all, B sequences, their new tokens side by side.

    query_start_B1: int32 [B+1], where each sequence's tokens begin in the flat batch.
    context_B: int32 [B], tokens in the cache once this step's are written.
    block_table_BM: int32 [B, M], block ids in order; the padding repeats a valid id.
    positions_T: int64 [T], each token's position; a token sees keys at positions ≤ its own. A sequence's new
        tokens are its last: their positions end at context - 1.
    slots_T: int64 [T], where each token's key and value go.
    max_query, max_context: of the above, as host integers; upper bounds are enough.
    decodes, decode_query: the first `decodes` sequences have at most `decode_query` new tokens each; a GPU
        spreads the keys of these over many programs. Without it a step with prefill chunks is slower.
    """

    query_start_B1: Tensor
    context_B: Tensor
    block_table_BM: Tensor
    positions_T: Tensor
    slots_T: Tensor
    max_query: int
    max_context: int
    decodes: int = 0
    decode_query: int = 1


@dataclass(frozen=True)
class AttentionOptions:
    """How a layer attends, beyond plain causal attention.

    window: a token at position p sees keys at positions > p - window; None sees all.
    sinks: keys at positions < sinks are seen by every later token, window or not.
    soft_cap: scores become soft_cap·tanh(score / soft_cap) (Gemma 2).
    sink_logits_H: fp32 [heads], a learned score per head that joins the softmax's denominator.
    invariant: a token's output is the same bits whatever else is in the batch and however its prompt was cut
        into chunks. On a GPU that costs speed; on CPU it is always so.
    """

    window: int | None = None
    sinks: int = 0
    soft_cap: float | None = None
    sink_logits_H: Tensor | None = None
    invariant: bool = True


PLAIN = AttentionOptions()

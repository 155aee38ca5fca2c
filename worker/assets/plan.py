"""How much memory a model needs and what fits into it. Pure arithmetic over a `ModelInfo`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..config import KvCacheDtype
from ..kv.groups import KvGroups, layer_rules
from .checkpoint import ModelInfo
from .errors import ModelError
from .experts import mixture

SCALE_BYTES = 4
# of queries and of keys
_HEAD_NORMS = ("Gemma3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a KV pool holds, per rank.

    tokens: whose KV all layers keep. sequences: of the full `max_model_len` at once, rounded down; layers
    with a window keep no more of them than it needs. sequence_bytes: what each of them takes.
    """

    block_bytes: int
    blocks: int
    tokens: int
    sequences: int
    sequence_bytes: int


def kv_bytes_per_token(
    info: ModelInfo, dtype_bytes: int, tp: int = 1, kv_cache_dtype: KvCacheDtype = "auto"
) -> int:
    """Bytes of K and V of one token in all layers, on each of `tp` ranks.

    2 · layers · kv_heads · head_dim · bytes, plus an fp32 scale for each key and value where the cache is
    quantised; with more ranks than KV heads each head is kept several times. dtype_bytes: of the model.
    Raises ModelError when the heads cannot be divided among the ranks.
    """
    quantised = kv_cache_dtype != "auto"
    vector = info.head_dim + SCALE_BYTES if quantised else info.head_dim * dtype_bytes
    return 2 * info.layers * kv_heads_per_rank(info, tp) * vector


def parameters(info: ModelInfo) -> int:
    """Weights of a decoder as its config describes it; biases are not counted."""
    q_width, kv_width = info.heads * info.head_dim, info.kv_heads * info.head_dim
    attention = info.hidden_size * (2 * q_width + 2 * kv_width)
    norms = 2 * info.hidden_size
    if info.architecture == "Gemma3ForCausalLM":
        # behind each half as before it
        norms *= 2
    if info.architecture in _HEAD_NORMS:
        norms += 2 * info.head_dim
    embeddings = info.vocab_size * info.hidden_size * (1 if info.tie_word_embeddings else 2)
    mlps = _mlp_weights(info, met_only=False)
    return embeddings + mlps + info.layers * (attention + norms) + info.hidden_size


def _mlp_weights(info: ModelInfo, *, met_only: bool) -> int:
    """Of all layers. met_only: of experts, as many as a token meets."""
    found = mixture(info)
    dense = info.layers if found is None else info.layers - len(found.layers)
    weights = dense * 3 * info.hidden_size * info.intermediate_size
    if found is not None:
        experts = found.choices if met_only else found.experts
        each = 3 * info.hidden_size * found.inner
        weights += len(found.layers) * (experts * each + found.experts * info.hidden_size)
    return weights


def attention_doubling(info: ModelInfo) -> float:
    """Tokens of context at which attending to them takes as much arithmetic as the weights of the layers.

    2 · parameters (of experts, those that a token meets) against 4 · heads · head_dim · context for each
    layer that sees all of the past; infinite where none does.
    """
    embeddings = info.vocab_size * info.hidden_size * (1 if info.tie_word_embeddings else 2)
    per_token = 2 * info.layer_windows.count(None) * info.heads * info.head_dim
    idle = _mlp_weights(info, met_only=False) - _mlp_weights(info, met_only=True)
    return (parameters(info) - idle - embeddings) / per_token if per_token else inf


def kv_groups(info: ModelInfo, window: int | None = None, sinks: int = 0) -> KvGroups:
    """How the model's layers share blocks; window and sinks: as asked for, on top of the model's own."""
    return KvGroups.of(layer_rules(info.layer_windows, window, sinks))


def capacity(
    memory: int, per_layer: int, groups: KvGroups, block_size: int, max_model_len: int, chunk: int
) -> Capacity:
    """What `memory` bytes of KV pool hold. Zero blocks are an answer, not an error.

    per_layer: bytes of a token in one layer, see `kv_bytes_per_token`. chunk: tokens of one step at most.
    """
    block_bytes = per_layer * groups.block_layers * block_size
    blocks = max(0, memory) // block_bytes
    needed = groups.most_blocks(max_model_len, block_size, chunk)
    tokens = blocks // len(groups) * block_size
    return Capacity(block_bytes, blocks, tokens, blocks // needed, needed * block_bytes)


def kv_heads_per_rank(info: ModelInfo, tp: int) -> int:
    """Raises ModelError when the heads cannot be divided among `tp` ranks."""
    if tp < 1 or info.heads % tp != 0 or max(info.kv_heads, tp) % min(info.kv_heads, tp) != 0:
        raise ModelError(
            f"{info.heads} attention heads and {info.kv_heads} KV heads cannot be divided among {tp} ranks.",
            "Choose a tensor-parallel size that divides both.",
        )
    return max(1, info.kv_heads // tp)

"""The only door to kernels: one typed function per operation; which implementation runs is decided here.

Callers hold tensors and shapes, never kernels. CUDA tensors (ROCm's too) go to Triton, whose modules are
imported at the first such call: a CPU needs no Triton. On CPU in bf16 the C++ kernels run where they could be
compiled, torch otherwise. A row's value does not depend on how many rows came with it, on CPU always, and on
CUDA where linear layers are prepared as invariant.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .cpu.native import Kernels, library, status
from .cpu.recording import Memory as RecordingMemory
from .cpu.recording import can_record, record
from .kv_cache import reference as kv_reference
from .kv_cache.layout import KvCache, KvLayout
from .linear.prepared import Prepared, Quantization, apply_linear, prepare_linear
from .logprobs import reference as logprobs_reference
from .logprobs.reference import Logprobs
from .moe import reference as moe_reference
from .moe.prepared import PreparedExperts, apply_experts, prepare_experts, route_native
from .moe.reference import Routing
from .paged_attention import cpu as attention_cpu
from .paged_attention.metadata import PLAIN, AttentionMetadata, AttentionOptions
from .paged_attention.reference import paged_attention_tiles
from .penalties import reference as penalties_reference
from .ranks.shared import ExchangeMemory, RankExchange, make_exchange
from .rms_norm import reference as rms_reference
from .rotary import cpu as rotary_cpu
from .rotary import reference as rotary_reference
from .sampling import cpu as sampling_cpu
from .sampling.reference import sample_reference
from .sampling.seeds import child_seed
from .silu_mul import reference as gate_reference

__all__ = [
    "Activation",
    "AttentionMetadata",
    "AttentionOptions",
    "ExchangeMemory",
    "KvCache",
    "KvLayout",
    "Logprobs",
    "Prepared",
    "PreparedExperts",
    "Quantization",
    "RankExchange",
    "RecordingMemory",
    "Routing",
    "add_rms_norm_",
    "angles",
    "argmax",
    "can_record",
    "child_seed",
    "copy_blocks",
    "cpu_status",
    "embed",
    "experts_add_",
    "gate_mul",
    "gather_blocks",
    "linear",
    "linear_add",
    "make_exchange",
    "norm_add_",
    "norm_heads_",
    "norm_linear",
    "paged_attention",
    "penalise",
    "prepare_experts",
    "prepare_linear",
    "record",
    "rotary_store",
    "route",
    "sample",
    "scatter_blocks",
    "set_cpu_threads",
    "token_logprobs",
]

Activation = Literal["silu", "gelu_tanh"]

LANES = 16
# beyond these rows cuBLAS is faster, where rows may see each other
FEW_ROWS = 16


def cpu_status() -> str:
    """Which implementation a CPU runs, and why."""
    return status()


def set_cpu_threads(threads: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Threads for a model in this dtype: the native kernels', or torch's where those don't run."""
    kernels = library() if dtype == torch.bfloat16 else None
    # two pools would fight for the cores: those of torch's spin for a while after each region
    torch.set_num_threads(threads if kernels is None else 1)
    if kernels is not None:
        kernels.set_threads(threads)


def embed(tokens_T: Tensor, table_VD: Tensor, scale: float = 1.0, first: int | None = None) -> Tensor:
    """Rows of the table times scale, in fp32: the beginning of a residual stream [tokens, hidden].

    first: the token of the table's first row, where it is a part of the vocabulary; others are zeros.
    """
    V, D = table_VD.shape
    kernels = _native(table_VD, D)
    if kernels is None and first is not None:
        rows_T = tokens_T - first
        foreign_T = (rows_T < 0) | (rows_T >= V)
        rows_TD = embed(rows_T.masked_fill(foreign_T, 0), table_VD, scale)
        return rows_TD.masked_fill_(foreign_T[:, None], 0.0)
    if kernels is None:
        rows_TD = table_VD[tokens_T].float()
        return rows_TD if scale == 1 else rows_TD * scale
    out_TD = torch.empty((tokens_T.shape[0], D), dtype=torch.float32)
    places = tokens_T.data_ptr(), table_VD.data_ptr(), out_TD.data_ptr()
    kernels.df_embed(*places, *out_TD.shape, first or 0, V, scale)
    return out_TD


def add_rms_norm_(
    x_TD: Tensor | None, residual_TD: Tensor, w_D: Tensor, eps: float, offset: float = 0.0
) -> Tensor:
    """residual (fp32) += x, in place; returns norm(residual)·(w + offset) [tokens, hidden] in w's dtype.

    x_TD: what `linear_add` returned; None where nothing is left to add. offset: 1 where weights are kept as
    differences from one, which their dtype holds more exactly.
    """
    kernels = _native(w_D, residual_TD.shape[1])
    if kernels is not None:
        out_TD = torch.empty_like(residual_TD, dtype=w_D.dtype)
        x = None if x_TD is None else x_TD.data_ptr()
        places = (residual_TD.data_ptr(), w_D.data_ptr(), out_TD.data_ptr())
        kernels.df_add_rms_norm(x, *places, *residual_TD.shape, eps, offset)
        return out_TD
    if residual_TD.is_cuda:
        from .rms_norm.kernel import add_rms_norm_triton_, rms_norm_triton

        if x_TD is None:
            return rms_norm_triton(residual_TD, w_D, eps, offset)
        return add_rms_norm_triton_(x_TD, residual_TD, w_D, eps, offset)
    if x_TD is not None:
        residual_TD += x_TD
    return rms_reference.rms_norm(residual_TD, w_D, eps, offset).to(w_D.dtype)


def norm_add_(x_TD: Tensor, residual_TD: Tensor, w_D: Tensor, eps: float, offset: float = 0.0) -> None:
    """residual (fp32) += norm(x)·(w + offset), in place: norms that stand behind a projection."""
    if x_TD.is_cuda:
        from .rms_norm.kernel import norm_add_triton_

        return norm_add_triton_(x_TD, residual_TD, w_D, eps, offset)
    kernels = _native(x_TD, w_D.shape[0])
    if kernels is None:
        return rms_reference.norm_add_(x_TD, residual_TD, w_D, eps, offset)
    pointers = x_TD.data_ptr(), residual_TD.data_ptr(), w_D.data_ptr()
    kernels.df_norm_add(*pointers, *x_TD.shape, eps, offset)
    return None


def norm_heads_(x_THD: Tensor, w_HD: Tensor, eps: float, offset: float = 0.0) -> None:
    """The first heads of x [tokens, heads, head_dim] become their norms·(w + offset), in place.

    w_HD [normed heads, head_dim]: a row for each of them.
    """
    if x_THD.is_cuda:
        from .rms_norm.kernel import norm_heads_triton_

        return norm_heads_triton_(x_THD, w_HD, eps, offset)
    kernels = _native(x_THD, w_HD.shape[1])
    if kernels is None:
        return rms_reference.norm_heads_(x_THD, w_HD, eps, offset)
    T, heads, D = x_THD.shape
    kernels.df_norm_heads(x_THD.data_ptr(), w_HD.data_ptr(), T, heads, w_HD.shape[0], D, eps, offset)
    return None


def linear(x_TK: Tensor, prepared: Prepared, out_dtype: torch.dtype | None = None) -> Tensor:
    """x_TK [tokens, in] → [tokens, out] in `out_dtype` (x's own, or fp32)."""
    if not x_TK.is_cuda or _cublas(x_TK.shape[0], prepared):
        return apply_linear(x_TK, prepared, out_dtype)
    from .linear.kernel import linear_triton

    return linear_triton(x_TK, prepared.weight, prepared.scale, prepared.bias, out_dtype=out_dtype)


def linear_add(x_TK: Tensor, prepared: Prepared, residual_TN: Tensor) -> Tensor | None:
    """Adds x·Wᵀ to the residual stream (fp32), in place → None.

    Where adding is better left to the norm that follows, returns x·Wᵀ instead: hand it on to that.
    """
    if not x_TK.is_cuda or _cublas(x_TK.shape[0], prepared):
        return apply_linear(x_TK, prepared)
    from .linear.kernel import linear_add_triton_

    linear_add_triton_(x_TK, prepared.weight, prepared.scale, prepared.bias, residual_TN)
    return None


def norm_linear(
    x_TK: Tensor | None,
    residual_TK: Tensor,
    norm_K: Tensor,
    eps: float,
    prepared: Prepared,
    activation: Activation | None = None,
    offset: float = 0.0,
) -> Tensor:
    """residual (fp32) += x, in place; returns norm(residual)·Wᵀ, or act(gate)·up of it, in norm_K's dtype.

    x_TK, offset: as for `add_rms_norm_`. With an activation W holds the gate's rows, then those of up.
    """
    if residual_TK.is_cuda and not _cublas(residual_TK.shape[0], prepared):
        from .norm_linear.kernel import norm_linear_triton

        if x_TK is not None:
            residual_TK += x_TK
        weights = (prepared.weight, prepared.scale, prepared.bias)
        return norm_linear_triton(residual_TK, norm_K, eps, *weights, activation, offset=offset)
    y_TN = linear(add_rms_norm_(x_TK, residual_TK, norm_K, eps, offset), prepared)
    return y_TN if activation is None else gate_mul(y_TN, activation)


def angles(positions_T: Tensor, inverse_R: Tensor, span: int | None = None) -> Tensor:
    """fp32 [tokens, 2·R]: cosines, then sines, of position · inverse frequency (fp64), for any position.

    span: as many rows more, of positions no farther than span - 1.
    """
    kernels = library() if positions_T.device.type == "cpu" else None
    if kernels is None:
        return rotary_reference.angles(positions_T, inverse_R, span)
    T, R = positions_T.shape[0], inverse_R.shape[0]
    out_PR = torch.empty((T if span is None else 2 * T, 2 * R), dtype=torch.float32)
    kernels.df_angles(positions_T.data_ptr(), inverse_R.data_ptr(), out_PR.data_ptr(), T, R, span or 0)
    return out_PR


def route(logits_TE: Tensor, choices: int, *, renormalise: bool) -> Routing:
    """The `choices` likeliest experts of each token (fp32 logits [tokens, experts]), and the pairs in order.

    renormalise: whether a token's weights add up to one, or only those of all experts would.
    """
    if logits_TE.is_cuda:
        from .moe.kernel import route_triton

        return route_triton(logits_TE, choices, renormalise=renormalise)
    kernels = library() if logits_TE.dtype == torch.float32 and logits_TE.is_contiguous() else None
    if kernels is None:
        return moe_reference.route(logits_TE, choices, renormalise=renormalise)
    return route_native(kernels, logits_TE, choices, renormalise=renormalise)


def experts_add_(x_TD: Tensor, routing: Routing, prepared: PreparedExperts, residual_TD: Tensor) -> None:
    """residual (fp32) += the weighted sum of the chosen experts' gated MLPs of x (contiguous), in place."""
    if not x_TD.is_cuda:
        return apply_experts(x_TD, routing, prepared, residual_TD)
    from .moe.kernel import experts_add_triton_

    return experts_add_triton_(x_TD, routing, prepared, residual_TD)


def rotary_store(
    qkv_THD: Tensor,
    cos_sin_PR: Tensor,
    rows_T: Tensor,
    slots_T: Tensor,
    kv: KvCache,
    layer: int,
    sink_rows_T: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotates queries and keys, writes keys and values to their slots → (q, q_sink), each [tokens, heads, D].

    qkv_THD [tokens, heads + 2·kv_heads, head_dim] may be overwritten; q may be a view of it.
    rows_T: int64, each token's row of cos_sin_PR (its position, if these are all positions).
    q_sink: the queries turned by `sink_rows_T` instead, for keys of sinks; None without.
    """
    places = (cos_sin_PR, rows_T, slots_T, kv, layer, sink_rows_T)
    if qkv_THD.is_cuda:
        from .rotary.kernel import rotary_store_triton

        return rotary_store_triton(qkv_THD, *places)
    kernels = library() if rotary_cpu.supports(qkv_THD, kv) else None
    if kernels is None:
        return rotary_reference.rotary_store(qkv_THD, *places)
    return rotary_cpu.rotary_store_cpu(kernels, qkv_THD, *places)


def gate_mul(gate_up_TI: Tensor, activation: Activation) -> Tensor:
    """act(gate)·up: [tokens, 2·intermediate] → [tokens, intermediate]."""
    if gate_up_TI.is_cuda:
        from .silu_mul.kernel import gate_mul_triton

        return gate_mul_triton(gate_up_TI, activation)
    T, width = gate_up_TI.shape
    kernels = _native(gate_up_TI, width // 2)
    if kernels is None:
        gelu = activation == "gelu_tanh"
        return (gate_reference.gelu_tanh_mul if gelu else gate_reference.silu_mul)(gate_up_TI)
    out_TI = gate_up_TI.new_empty(T, width // 2)
    run = kernels.df_gelu_tanh_mul if activation == "gelu_tanh" else kernels.df_silu_mul
    run(gate_up_TI.data_ptr(), out_TI.data_ptr(), T, width // 2)
    return out_TI


def copy_blocks(slabs: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies whole blocks [blocks, ...], in place; no block is both source and target."""
    if slabs.is_cuda:
        from .kv_cache.kernel import copy_blocks_triton

        return copy_blocks_triton(slabs, sources, targets)
    return kv_reference.copy_blocks(slabs, sources, targets)


def gather_blocks(slabs: Tensor, blocks: Tensor, out: Tensor) -> None:
    """out [n, ...] = slabs[blocks]; on CUDA `out` may be pinned host memory."""
    if slabs.is_cuda:
        from .kv_cache.kernel import gather_blocks_triton

        return gather_blocks_triton(slabs, blocks, out)
    return kv_reference.gather_blocks(slabs, blocks, out)


def scatter_blocks(staged: Tensor, slabs: Tensor, blocks: Tensor) -> None:
    """slabs[blocks] = staged [n, ...]; on CUDA `staged` may be pinned host memory."""
    if slabs.is_cuda:
        from .kv_cache.kernel import scatter_blocks_triton

        return scatter_blocks_triton(staged, slabs, blocks)
    return kv_reference.scatter_blocks(staged, slabs, blocks)


def paged_attention(
    q_THD: Tensor,
    kv: KvCache,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    options: AttentionOptions = PLAIN,
    q_sink_THD: Tensor | None = None,
) -> Tensor:
    """Causal attention of this step's tokens over the paged cache → [tokens, heads, head_dim].

    q_sink_THD: queries for the sink keys, if they are others (see `rotary_store`).
    """
    if q_THD.is_cuda:
        from .paged_attention.kernel import paged_attention_triton

        return paged_attention_triton(q_THD, kv, layer, meta, scale, options, q_sink_THD)
    kernels = library() if attention_cpu.supports(q_THD, kv) else None
    if kernels is None:
        return paged_attention_tiles(q_THD, kv, layer, meta, scale, options, q_sink_THD)
    return attention_cpu.paged_attention_cpu(kernels, q_THD, kv, layer, meta, scale, options, q_sink_THD)


def argmax(logits_RV: Tensor) -> Tensor:
    """The likeliest token of each row of logits (fp32 [rows, vocabulary]) → int64 [rows]."""
    kernels = library() if sampling_cpu.supports(logits_RV) else None
    return logits_RV.argmax(-1) if kernels is None else sampling_cpu.argmax_cpu(kernels, logits_RV)


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    """One token per row of logits (fp32 [rows, vocabulary]) → int64 [rows], by each row's own parameters.

    temperature (0 is greedy), top_p, min_p: fp32; top_k (0 is off), seed (64 bits, as signed) and position:
    int64; all contiguous. The noise is a function of (seed, position, token).
    """
    rows = (temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R)
    if logits_RV.is_cuda:
        from .sampling.kernel import sample_triton

        return sample_triton(logits_RV, *rows)
    kernels = library() if sampling_cpu.supports(logits_RV) else None
    if kernels is None:
        return sample_reference(logits_RV, *rows)
    return sampling_cpu.sample_cpu(kernels, logits_RV, *rows)


def penalise(
    logits_RV: Tensor,
    tokens_RL: Tensor,
    prompt_R: Tensor,
    known_R: Tensor,
    repetition_R: Tensor,
    presence_R: Tensor,
    frequency_R: Tensor,
) -> Tensor:
    """New logits, with each row's penalties on the tokens it has seen.

    tokens_RL [rows, length]: prompt, then output, then padding; prompt_R, known_R (int64): lengths of the
    first and of both. The penalties are fp32 [rows]; 1, 0 and 0 change nothing.
    """
    rows = (tokens_RL, prompt_R, known_R, repetition_R, presence_R, frequency_R)
    if logits_RV.is_cuda:
        from .penalties.kernel import penalise_triton

        return penalise_triton(logits_RV, *rows)
    return penalties_reference.penalise(logits_RV, *rows)


def token_logprobs(logits_RV: Tensor, tokens_R: Tensor, top: int) -> Logprobs:
    """Log-probabilities and ranks of tokens_R (int64), and the `top` likeliest tokens of each row."""
    if logits_RV.is_cuda:
        from .logprobs.kernel import token_logprobs_triton

        return token_logprobs_triton(logits_RV, tokens_R, top)
    return logprobs_reference.token_logprobs(logits_RV, tokens_R, top)


def _cublas(rows: int, prepared: Prepared) -> bool:
    return rows > FEW_ROWS and not prepared.invariant and prepared.scale is None


def _native(x: Tensor, width: int) -> Kernels | None:
    """The kernels, if they take this tensor: contiguous bf16 on CPU, rows of whole vectors."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or width % LANES or not x.is_contiguous():
        return None
    return library()

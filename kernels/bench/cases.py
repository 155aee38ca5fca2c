"""What is timed: each operation at the sizes that decoding meets, with the bytes and flops that they imply.

Everything goes through `ops`, as the model does. Sizes are Llama-3-8B's on a GPU, SmolLM2-135M's on a CPU.
Bytes are those that must be moved once: weights, cache, activations in and out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import ops
from ..linear.reference import linear_reference
from ..norm_linear import reference as norm_linear_reference
from ..rms_norm import reference as rms_reference
from ..sampling.reference import sample_reference
from ..silu_mul import reference as gate_reference
from .attention_cases import attention_cases
from .case import Case, Model, Work
from .moe_cases import moe_cases

BF16 = torch.bfloat16
EPS = 1e-5


LLAMA_3_8B = Model(4096, 14336, 32, 8, 128, 128256, (1, 8, 16, 64))
SMOLLM2_135M = Model(576, 1536, 9, 3, 64, 49152, (1, 8, 32))


def cases(device: torch.device) -> Iterator[Case]:
    model = LLAMA_3_8B if device.type == "cuda" else SMOLLM2_135M
    yield from _linear_cases(model, device)
    yield from moe_cases(device)
    yield from _row_cases(model, device)
    yield from attention_cases(model, device)
    yield from _sampling_cases(model, device)


def _linear_cases(model: Model, device: torch.device) -> Iterator[Case]:
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    shapes = {"qkv": (qkv, model.hidden), "down": (model.hidden, model.inner)}
    for T in model.rows:
        for name, (N, K) in shapes.items():
            for quantization in ("none", "int8"):
                yield _linear(f"{name}, {T} rows", T, N, K, quantization, device)
        yield _norm_gate(f"gate and up, {T} rows", T, model, device)
    yield _linear("head, 1 row", 1, model.vocab, model.hidden, "none", device)
    yield _linear("qkv, 2048 rows", 2048, qkv, model.hidden, "none", device)


def _linear(
    variant: str, T: int, N: int, K: int, quantization: ops.Quantization, device: torch.device
) -> Case:
    def make() -> Work:
        w_NK = (torch.randn((N, K), device=device) / K**0.5).to(BF16)
        x_TK = torch.randn((T, K), device=device).to(BF16)
        prepared = ops.prepare_linear(w_NK, None, invariant=True, quantization=quantization)
        return Work(
            lambda: ops.linear(x_TK, prepared),
            lambda: linear_reference(x_TK, w_NK),
            {"torch": lambda: torch.nn.functional.linear(x_TK, w_NK)} if quantization == "none" else {},
        )

    weight_bytes = N * K if quantization == "int8" else 2 * N * K
    name = variant if quantization == "none" else f"{variant}, {quantization}"
    return Case("linear", name, weight_bytes + 2 * T * (N + K), 2 * T * N * K, make)


def _norm_gate(variant: str, T: int, model: Model, device: torch.device) -> Case:
    N, K = model.inner, model.hidden

    def make() -> Work:
        w_NK = (torch.randn((2 * N, K), device=device) / K**0.5).to(BF16)
        h_TK, norm_K = torch.randn((T, K), device=device), torch.ones(K, device=device, dtype=BF16)
        prepared = ops.prepare_linear(w_NK, None, invariant=True)
        return Work(
            lambda: ops.norm_linear(None, h_TK, norm_K, EPS, prepared, "silu"),
            lambda: norm_linear_reference.norm_linear(h_TK, norm_K, EPS, w_NK, activation="silu"),
        )

    return Case("norm_linear", variant, 4 * N * K + T * (4 * K + 2 * N), 4 * T * N * K, make)


def _row_cases(model: Model, device: torch.device) -> Iterator[Case]:
    T, D, inner = 64, model.hidden, model.inner

    def norm() -> Work:
        x_TD, residual_TD = torch.randn((T, D), device=device).to(BF16), torch.randn((T, D), device=device)
        w_D = torch.ones(D, device=device, dtype=BF16)
        return Work(
            lambda: ops.add_rms_norm_(x_TD, residual_TD.clone(), w_D, EPS),
            lambda: rms_reference.add_rms_norm_(x_TD, residual_TD.clone(), w_D, EPS),
        )

    def gate() -> Work:
        x_TI = torch.randn((T, 2 * inner), device=device).to(BF16)
        return Work(lambda: ops.gate_mul(x_TI, "silu"), lambda: gate_reference.silu_mul(x_TI))

    # the copy of the residual that keeps repetitions alike is counted
    yield Case("rms_norm", f"add, {T} rows", T * D * (2 + 4 + 4 + 4 + 4 + 2), 0, norm)
    yield Case("silu_mul", f"{T} rows", T * inner * (4 + 2), 0, gate)


def _sampling_cases(model: Model, device: torch.device) -> Iterator[Case]:
    filters = {
        "plain": (1.0, 0, 1.0),
        "greedy": (0.0, 0, 1.0),
        "top-p": (1.0, 0, 0.9),
        "top-k and top-p": (0.7, 20, 0.8),
    }
    for R in (1, 64):
        for name, (temperature, top_k, top_p) in filters.items():
            yield _sample(f"{name}, {R} rows", R, model.vocab, temperature, top_k, top_p, device)


def _sample(
    variant: str, R: int, V: int, temperature: float, top_k: int, top_p: float, device: torch.device
) -> Case:
    def make() -> Work:
        x_RV = torch.randn((R, V), device=device) * 3
        index = torch.arange(R, device=device)
        rows = (
            *(torch.full((R,), temperature, device=device), torch.full_like(index, top_k)),
            *(torch.full((R,), top_p, device=device), torch.zeros(R, device=device), index, index),
        )
        return Work(lambda: ops.sample(x_RV, *rows), lambda: sample_reference(x_RV, *rows))

    return Case("sampling", variant, 4 * R * V, 0, make)

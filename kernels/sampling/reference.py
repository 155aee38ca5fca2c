"""Sampling: penalties, filters and Gumbel-max with counter-based noise, in plain torch.

A token is drawn as argmax(filtered logits + Gumbel noise), which samples the filtered distribution exactly
(Gumbel 1954; Maddison et al. 2014). The noise is a pure function of (seed, position, token id): what a
request generates does not depend on its neighbours, on preemption, or on the worker it runs on.
Shapes: logits_RV [rows, vocabulary], fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .seeds import MASK32, MIX_1, MIX_2, WEYL, noise_key


def apply_penalties(
    logits_RV: Tensor,
    seen_RV: Tensor,
    output_counts_RV: Tensor,
    repetition_R1: Tensor,
    presence_R1: Tensor,
    frequency_R1: Tensor,
) -> Tensor:
    """repetition acts on tokens of prompt or output (`seen`), the other two on counts in the output."""
    penalised = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where(seen_RV, penalised, logits_RV)
    return logits_RV - output_counts_RV * frequency_R1 - (output_counts_RV > 0) * presence_R1


def filter_logits(
    logits_RV: Tensor, top_k_R: list[int], top_p_R: list[float], min_p_R: list[float]
) -> Tensor:
    """Sets to -inf what top-k (0 is off), then top-p, then min-p leave out; ties at the border stay in.

    top-p keeps the smallest set of most likely tokens whose mass reaches p; the best token always stays.
    """
    rows = [
        _filter_row(logits, k, p, m)
        for logits, k, p, m in zip(logits_RV, top_k_R, top_p_R, min_p_R, strict=True)
    ]
    return torch.stack(rows)


def _filter_row(logits_V: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    floor = logits_V.new_full((), float("-inf"))
    if 0 < top_k < logits_V.numel():
        floor = torch.maximum(floor, logits_V.topk(top_k).values[-1])
    if top_p < 1.0:
        kept = logits_V.masked_fill(logits_V < floor, float("-inf"))
        ordered, _ = kept.sort(descending=True)
        mass = ordered.softmax(-1).cumsum(-1)
        floor = torch.maximum(floor, ordered[(mass < top_p).sum().clamp(max=ordered.numel() - 1)])
    if min_p > 0.0:
        floor = torch.maximum(floor, logits_V.max() + torch.log(logits_V.new_tensor(min_p)))
    return logits_V.masked_fill(logits_V < floor, float("-inf"))


def sample_reference(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    """One token per row, int64; temperature 0 is greedy.

    temperature, top_p, min_p: fp32 [rows]; top_k, seed (64 bits, as signed), position: int64 [rows].
    """
    random_N = temperature_R.nonzero().flatten()
    if random_N.numel():
        kept_NV = filter_logits(
            logits_RV[random_N] / temperature_R[random_N].unsqueeze(1),
            top_k_R[random_N].tolist(),
            top_p_R[random_N].tolist(),
            min_p_R[random_N].tolist(),
        )
        seeds, positions = seed_R[random_N].tolist(), position_R[random_N].tolist()
        noise_NV = gumbel_noise(seeds, positions, kept_NV.shape[1], kept_NV.device)
        logits_RV = logits_RV.index_copy(0, random_N, kept_NV + noise_NV)
    return logits_RV.argmax(-1)


def gumbel_noise(seeds_R: list[int], positions_R: list[int], vocab: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise, fp32 [rows, vocab], from (seed, position, token id) alone."""
    tokens_V = torch.arange(vocab, dtype=torch.int64, device=device)
    keys = [noise_key(seed, position) for seed, position in zip(seeds_R, positions_R, strict=True)]
    keys_R2 = torch.tensor(keys, dtype=torch.int64, device=device)
    bits = _mix((tokens_V * WEYL + keys_R2[:, :1]) & MASK32)
    bits = _mix(bits ^ keys_R2[:, 1:])
    # the argmax is decided by small exponentials: all 32 bits near zero, never exactly 0 or 1
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(x: Tensor) -> Tensor:
    """32-bit finaliser in int64 lanes, so that CPU and GPU agree bit for bit."""
    x = x ^ (x >> 16)
    x = (x * MIX_1) & MASK32
    x = x ^ (x >> 15)
    x = (x * MIX_2) & MASK32
    return x ^ (x >> 16)

"""Penalties on tokens that a sequence has seen, from its token ids.

repetition (Keskar et al. 2019) divides positive and multiplies negative logits of tokens in prompt or output;
presence and frequency (OpenAI's API) are subtracted once, and per occurrence, for tokens in the output.
Shapes: logits_RV fp32 [rows, vocabulary], tokens_RL [rows, length], padding from known_R on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampling.reference import apply_penalties


def penalise(
    logits_RV: Tensor,
    tokens_RL: Tensor,
    prompt_R: Tensor,
    known_R: Tensor,
    repetition_R: Tensor,
    presence_R: Tensor,
    frequency_R: Tensor,
) -> Tensor:
    """New logits. prompt_R, known_R: how many tokens the prompt has, and prompt and output together."""
    place_L = torch.arange(tokens_RL.shape[1], device=tokens_RL.device)
    known_RL = place_L < known_R[:, None]
    output_RL = known_RL & (place_L >= prompt_R[:, None])
    counts_2RV = logits_RV.new_zeros((2, *logits_RV.shape), dtype=torch.int32)
    tokens_RL = tokens_RL.long().where(known_RL, 0)
    for counts_RV, counted_RL in zip(counts_2RV, (known_RL, output_RL), strict=True):
        counts_RV.scatter_add_(1, tokens_RL, counted_RL.to(torch.int32))
    columns = (repetition_R[:, None], presence_R[:, None], frequency_R[:, None])
    return apply_penalties(logits_RV, counts_2RV[0] > 0, counts_2RV[1], *columns)

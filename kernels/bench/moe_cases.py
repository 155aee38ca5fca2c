"""What is timed of a mixture of experts: one token, which meets a few experts, and so many that all are met.

Sizes are Qwen3-30B-A3B's on a GPU, a small one's on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import ops
from ..moe.reference import experts_reference
from .case import Case, Work

BF16 = torch.bfloat16


def moe_cases(device: torch.device) -> Iterator[Case]:
    experts, choices, hidden, inner = (128, 8, 2048, 768) if device.type == "cuda" else (16, 4, 576, 256)
    for T, met in ((1, choices), (4 * experts, experts)):
        yield _experts(f"{T} rows", (T, met), experts, choices, hidden, inner, device)


def _experts(
    variant: str,
    rows: tuple[int, int],
    experts: int,
    choices: int,
    hidden: int,
    inner: int,
    device: torch.device,
) -> Case:
    """rows: tokens, and how many experts they meet in all."""
    T, met = rows

    def make() -> Work:
        gate_up = (torch.randn((experts, 2 * inner, hidden), device=device) / hidden**0.5).to(BF16)
        down = (torch.randn((experts, hidden, inner), device=device) / inner**0.5).to(BF16)
        prepared = ops.prepare_experts(iter(gate_up), iter(down), experts)
        x_TD, residual_TD = (torch.randn((T, hidden), device=device) for _ in range(2))
        x_TD = x_TD.to(BF16)
        routing = ops.route(torch.randn((T, experts), device=device), choices, renormalise=True)

        def run() -> torch.Tensor:
            out_TD = residual_TD.clone()
            ops.experts_add_(x_TD, routing, prepared, out_TD)
            return out_TD

        return Work(run, lambda: residual_TD + experts_reference(x_TD, routing, gate_up, down))

    weight_bytes = met * 3 * inner * hidden * 2
    return Case("moe", variant, weight_bytes + T * hidden * (2 + 16), 6 * T * choices * inner * hidden, make)

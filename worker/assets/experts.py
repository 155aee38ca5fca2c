"""Mixtures of experts, by config.json: how many there are, how many a token meets, in which layers."""

from __future__ import annotations

from dataclasses import dataclass

from .checkpoint import ModelInfo
from .errors import ModelError


@dataclass(frozen=True, slots=True)
class Mixture:
    """experts: of a sparse layer; choices: of these, for a token; inner: width of one; layers: the sparse."""

    experts: int
    choices: int
    inner: int
    layers: frozenset[int]


def mixture(info: ModelInfo) -> Mixture | None:
    """None for dense models. Raises ModelError for settings that are missing or contradict each other."""
    every = range(info.layers)
    if info.architecture == "MixtralForCausalLM":
        return _mixture(info, "intermediate_size", frozenset(every))
    if info.architecture == "Qwen3MoeForCausalLM":
        step, dense = info.raw.get("decoder_sparse_step", 1), info.raw.get("mlp_only_layers") or ()
        sparse = (layer for layer in every if layer not in dense and (layer + 1) % step == 0)
        return _mixture(info, "moe_intermediate_size", frozenset(sparse))
    return None


def _mixture(info: ModelInfo, inner: str, layers: frozenset[int]) -> Mixture:
    experts, choices = _number(info, "num_experts", "num_local_experts"), _number(info, "num_experts_per_tok")
    if choices > experts:
        raise ModelError(
            f"config.json lets a token meet {choices} of {experts} experts.", "Fetch this file again."
        )
    return Mixture(experts, choices, _number(info, inner), layers)


def _number(info: ModelInfo, *keys: str) -> int:
    value = next((info.raw[key] for key in keys if info.raw.get(key) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"config.json: {keys[0]} must be a positive integer, not {value!r}.", "Fetch this file again."
        )
    return value

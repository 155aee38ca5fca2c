"""Rotary frequencies, with the scalings that published checkpoints use. Pure functions of a `Rope`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..assets.errors import ModelError
from ..assets.rope import Rope

SCALINGS = ("linear", "llama3", "yarn", "longrope")


class Frequencies(NamedTuple):
    """inverse_R: fp32, radians per position of each pair that turns. scale: of cosines and sines."""

    inverse_R: Tensor
    scale: float = 1.0


def frequencies(rope: Rope, head_dim: int, positions: int | None) -> Frequencies:
    """positions: the longest sequence that is served, None without a limit. Raises ModelError."""
    turning = int(head_dim * rope.share)
    exponents = torch.arange(0, turning, 2, dtype=torch.float32) / turning
    inverse_R = torch.pow(rope.theta, exponents).reciprocal()
    if rope.scaling is None:
        return Frequencies(inverse_R)
    scaling, kind = rope.scaling, rope.scaling["rope_type"]
    try:
        if kind == "linear":
            return Frequencies(inverse_R / float(scaling["factor"]))
        if kind == "llama3":
            return Frequencies(_llama3(inverse_R, scaling))
        if kind == "yarn":
            return _yarn(inverse_R, rope.theta, scaling)
        if kind == "longrope":
            return _longrope(inverse_R, scaling, positions)
    except KeyError as error:
        raise ModelError(
            f"config.json lacks {error.args[0]} of its {kind} rotary scaling.", "Fetch this file again."
        ) from error
    raise ModelError(
        f"config.json asks for rotary scaling of type {kind!r}, which is not supported.",
        f"Serve a model with default rotary embeddings, or one of {', '.join(SCALINGS)}.",
    )


def frequencies_name(rope: Rope, positions: int | None) -> str:
    """Tells apart the frequencies that one model may have by the longest sequence served."""
    if rope.scaling is None or rope.scaling["rope_type"] != "longrope":
        return ""
    within = _within(int(rope.scaling["original_max_position_embeddings"]), positions)
    return "short rotary factors" if within else "long rotary factors"


def _within(trained: int, positions: int | None) -> bool:
    return positions is not None and positions <= trained


def _llama3(inverse_R: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, trained = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / inverse_R
    blend = ((trained / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inverse_R / factor + blend * inverse_R


def _yarn(inverse_R: Tensor, theta: float, scaling: Mapping[str, Any]) -> Frequencies:
    """Peng et al. 2023: frequencies by how often they turn within the trained length, and sharper scores."""
    factor, trained = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    pairs = len(inverse_R)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(trained / (times * 2 * math.pi)) / math.log(theta)

    low = pair_that_turns(float(scaling.get("beta_fast") or 32))
    high = pair_that_turns(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=torch.float32) - low) / (high - low if high > low else 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    return Frequencies(
        stretched * inverse_R / factor + (1 - stretched) * inverse_R, _yarn_scale(factor, scaling)
    )


def _yarn_scale(factor: float, scaling: Mapping[str, Any]) -> float:
    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    of_scores, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if of_scores and of_all:
        return growth(float(of_scores)) / growth(float(of_all))
    return growth(1.0)


def _longrope(inverse_R: Tensor, scaling: Mapping[str, Any], positions: int | None) -> Frequencies:
    """Ding et al. 2024: a factor for each frequency, searched for two lengths.

    Which of both is decided by the longest sequence served, once: cached keys have been turned already, so a
    sequence cannot change over when it grows past the trained length.
    """
    trained = int(scaling["original_max_position_embeddings"])
    name = "short_factor" if _within(trained, positions) else "long_factor"
    factors = torch.tensor(scaling[name], dtype=torch.float32)
    if len(factors) != len(inverse_R):
        raise ModelError(
            f"config.json has {len(factors)} rotary factors for {len(inverse_R)} frequencies.",
            "Fetch this file again.",
        )
    growth, scale = float(scaling["factor"]), scaling.get("attention_factor")
    if scale is None:
        scale = 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(trained))
    return Frequencies(inverse_R / factors, float(scale))

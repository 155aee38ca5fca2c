"""Rotary scaling in a GGUF, which keeps some of it as tensors, back to what config.json has of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ModelError

Factors = Mapping[str, npt.NDArray[np.float32]]

# of frequencies: what they are divided by
LLAMA3, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
TENSORS = (LLAMA3, SHORT, LONG)
# that all of Llama 3.1 to 3.3 have
_LOW, _HIGH, _TRAINED = 1.0, 4.0, 8192
_USE_SAFETENSORS = "Serve the model's original safetensors files instead."


def rope_scaling(
    source: Path, find: Callable[[str], Any], factors: Factors, head_dim: int, theta: float
) -> dict[str, Any] | None:
    """find: a setting of the architecture, None where absent. Raises ModelError for what cannot be told."""
    kind = find("rope.scaling.type")
    if LLAMA3 in factors:
        return _llama3(source, factors[LLAMA3], head_dim, theta)
    if SHORT in factors and LONG in factors and kind in (None, "none", "longrope"):
        return {
            "rope_type": "longrope",
            "short_factor": _decimals(factors[SHORT]),
            "long_factor": _decimals(factors[LONG]),
            "original_max_position_embeddings": find("rope.scaling.original_context_length"),
            "attention_factor": find("rope.scaling.attn_factor"),
        }
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": find("rope.scaling.factor")}
    raise ModelError(
        f"{source} scales its rotary embedding ({kind}), which cannot be converted.", _USE_SAFETENSORS
    )


def _llama3(source: Path, found: npt.NDArray[np.float32], head_dim: int, theta: float) -> dict[str, Any]:
    """The file has what the rule made of its parameters; the largest divisor is the factor."""
    factor = float(found.max())
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((_TRAINED / wavelength - _LOW) / (_HIGH - _LOW), 0.0, 1.0)
    expected = 1 / ((1 - blend) / factor + blend)
    if factor <= 1 or len(found) != len(expected) or not np.allclose(found, expected, rtol=1e-3):
        raise ModelError(f"{source} holds the tensor {LLAMA3}, which cannot be converted.", _USE_SAFETENSORS)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _TRAINED,
    }


def _decimals(values: npt.NDArray[np.float32]) -> list[float]:
    """The shortest that name them: what the checkpoint's config had."""
    return [float(str(np.float32(value))) for value in values.tolist()]

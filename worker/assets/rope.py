"""Rotary embeddings of a model, by config.json: of layers that see everything, and of those with a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_THETA = 10_000.0
# kinds of scaling that follow from the length that a model was first trained for
_OF_TRAINED_LENGTH = ("longrope", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """theta: the base. scaling: None for plain embeddings, else the parameters with their `rope_type`.

    share: of a head's numbers that turn, the first ones.
    """

    theta: float
    scaling: Mapping[str, Any] | None = None
    share: float = 1.0


def ropes(raw: Mapping[str, Any]) -> tuple[Rope, Rope]:
    """Of layers that see everything, and of those with a window; in most models they are the same.

    Published forms: `rope_parameters` (transformers 5), by layer type or for all; `rope_theta` and
    `rope_scaling` (before), with `rope_local_base_freq` for layers with a window. Raises ValueError for a
    base that is no positive number.
    """
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = raw.get("rope_theta", DEFAULT_THETA)
    local = raw.get("rope_local_base_freq")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        full, windowed = (parameters.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
        return _rope(raw, full, theta), _rope(raw, windowed, theta if local is None else local)
    rope = _rope(raw, parameters, theta)
    return rope, rope if local is None else _rope(raw, {}, local)


def _rope(raw: Mapping[str, Any], parameters: Mapping[str, Any], default_theta: Any) -> Rope:
    theta = parameters.get("rope_theta", default_theta)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ValueError(f"rope_theta must be a positive number, not {theta!r}")
    share = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    # the name that Phi-3's first checkpoints have for it
    kind = "longrope" if kind == "su" else kind
    scaling = None if kind == "default" else {**parameters, "rope_type": kind}
    if kind in _OF_TRAINED_LENGTH and scaling is not None:
        scaling |= _lengths(raw, parameters)
    return Rope(float(theta), scaling, 1.0 if share is None else float(share))


def _lengths(raw: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The length that the model was first trained for, and by what the config stretches it."""
    limit = raw.get("max_position_embeddings")
    trained = parameters.get("original_max_position_embeddings") or raw.get(
        "original_max_position_embeddings", limit
    )
    if not isinstance(limit, int) or not isinstance(trained, int) or trained < 1:
        raise ValueError(f"original_max_position_embeddings must be a positive integer, not {trained!r}")
    factor = parameters.get("factor")
    return {
        "original_max_position_embeddings": trained,
        "factor": limit / trained if factor is None else factor,
    }

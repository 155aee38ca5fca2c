"""Rotary embeddings of a model, by config.json: of layers that see everything, and of those with a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Rope:
    """theta: the base. scaling: None for plain embeddings, else the parameters with their `rope_type`."""

    theta: float
    scaling: Mapping[str, Any] | None = None


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
        return _rope(full, theta), _rope(windowed, theta if local is None else local)
    rope = _rope(parameters, theta)
    return rope, rope if local is None else _rope({}, local)


def _rope(parameters: Mapping[str, Any], default_theta: Any) -> Rope:
    theta = parameters.get("rope_theta", default_theta)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ValueError(f"rope_theta must be a positive number, not {theta!r}")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return Rope(float(theta), None if kind == "default" else {**parameters, "rope_type": kind})

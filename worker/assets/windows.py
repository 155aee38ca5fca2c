"""Which layers of a model attend through a window, by config.json. Knows nothing of how KV is kept."""

from __future__ import annotations

from typing import Any


def layer_windows(raw: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Of each layer, how many tokens back it sees, its own included; None sees all.

    Published forms, the explicit one first: `layer_types`, a `sliding_window_pattern` of n (each n-th layer
    is full), `max_window_layers` (the first ones are full), a bare `sliding_window` for all.
    """
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window is None:
        return (None,) * layers
    if raw.get("layer_types") is not None:
        slides = [kind == "sliding_attention" for kind in raw["layer_types"]]
    elif raw.get("sliding_window_pattern") is not None:
        slides = [(i + 1) % int(raw["sliding_window_pattern"]) != 0 for i in range(layers)]
    else:
        slides = [i >= int(raw.get("max_window_layers") or 0) for i in range(layers)]
    return tuple(int(window) if sliding else None for sliding in slides)

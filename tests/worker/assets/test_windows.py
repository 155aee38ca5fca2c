from __future__ import annotations

from typing import Any

import pytest

from decodefleet.worker.assets.windows import layer_windows


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        ({}, (None,) * 6),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 6}, (None,) * 6),
        ({"sliding_window": 8}, (8,) * 6),
        ({"sliding_window": 8, "use_sliding_window": False}, (None,) * 6),
        ({"sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None, 8, 8, None)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, (*[None] * 4, 8, 8)),
        (
            {"sliding_window": 8, "layer_types": [*["sliding_attention"] * 5, "full_attention"]},
            (8, 8, 8, 8, 8, None),
        ),
    ],
)
def test_published_forms(raw: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert layer_windows(raw, 6) == windows

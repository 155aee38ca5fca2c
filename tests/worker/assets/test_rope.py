from __future__ import annotations

from typing import Any

import pytest

from decodefleet.worker.assets.rope import Rope, ropes

LLAMA3 = {"rope_type": "llama3", "factor": 8}
LINEAR = {"type": "linear", "factor": 2.0}
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


SU = {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}
LENGTHS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 1024}
LONGROPE = SU | {"rope_type": "longrope", "original_max_position_embeddings": 1024, "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("raw", "rope", "window_rope"),
    [
        ({"partial_rotary_factor": 0.5}, *[Rope(1e4, None, 0.5)] * 2),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, *[Rope(1e4, None, 0.5)] * 2),
        ({"rope_scaling": SU, **LENGTHS}, *[Rope(1e4, LONGROPE)] * 2),
        ({"rope_scaling": YARN, "max_position_embeddings": 4096}, *[Rope(1e4, YARN)] * 2),
        ({}, Rope(1e4), Rope(1e4)),
        ({"rope_theta": 5e5}, Rope(5e5), Rope(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, Rope(5e5), Rope(5e5)),
        ({"rope_scaling": LINEAR}, *[Rope(1e4, LINEAR | {"rope_type": "linear"})] * 2),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, *[Rope(5e5, LLAMA3)] * 2),
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, Rope(1e6), Rope(1e4)),
        (
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LLAMA3},
            Rope(1e6, LLAMA3),
            Rope(1e4),
        ),
        ({"rope_parameters": BY_TYPE}, Rope(1e6, BY_TYPE["full_attention"]), Rope(1e4)),
        (
            {"rope_theta": 7.0, "rope_parameters": {"sliding_attention": {"rope_theta": 3.0}}},
            Rope(7),
            Rope(3),
        ),
    ],
)
def test_forms_of_both_transformers_generations(raw: dict[str, Any], rope: Rope, window_rope: Rope) -> None:
    assert ropes(raw) == (rope, window_rope)


@pytest.mark.parametrize("theta", ["1e4", 0, True, None])
def test_a_base_that_is_no_number_is_refused(theta: object) -> None:
    with pytest.raises(ValueError, match="rope_theta must be a positive number"):
        ropes({"rope_theta": theta})

from __future__ import annotations

from typing import Any

import pytest

from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.quantised import WeightFormat, weight_format


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"weights": weights}},
    }
    return {"quantization_config": config}


INT8 = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, WeightFormat("fp8")),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}},
            WeightFormat("fp8", block=(128, 64)),
        ),
        (compressed("pack-quantized", **INT8), WeightFormat("int8")),
        (compressed("int-quantized", **INT8), WeightFormat("int8")),
        (compressed("pack-quantized", **INT8 | {"num_bits": 4}), WeightFormat("int4", 4)),
        (compressed("float-quantized", type="float", num_bits=8), WeightFormat("float8")),
    ],
)
def test_forms(raw: dict[str, Any], wanted: WeightFormat | None) -> None:
    assert weight_format(raw) == wanted


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised by gptq"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised by mxfp4"),
        (compressed("pack-quantized", **INT8 | {"symmetric": False}), "asymmetric int of 8 bits"),
        (compressed("pack-quantized", **INT8 | {"actorder": "group"}), "which cannot be read"),
        (compressed("nvfp4-pack-quantized", type="float", num_bits=4), "float of 4 bits"),
        (compressed("marlin-24", **INT8), "marlin-24"),
    ],
)
def test_the_rest_is_named_beside_what_can_be_read(raw: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=rf"(?s){what}.*these can: fp8 .*compressed-tensors"):
        weight_format(raw)


def test_two_kinds_of_weights_are_refused() -> None:
    raw = compressed("pack-quantized", **INT8)
    raw["quantization_config"]["config_groups"]["group_1"] = {"weights": INT8 | {"num_bits": 4}}
    with pytest.raises(ModelError, match="2 kinds"):
        weight_format(raw)

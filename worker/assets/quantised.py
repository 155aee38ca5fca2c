"""How a checkpoint's weights are quantised, by config.json: what can be read, and clear words for the rest.

Torch-free; knows nothing of tensors' names in a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ModelError

SUPPORTED = (
    "fp8 (scales per tensor, channel or block) and compressed-tensors (fp8, or symmetric integers of "
    "4 or 8 bits)"
)
_INTEGER_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """name: for people. bits: of a packed integer. block: rows and columns that share a scale, where that is
    not told by the scales' own shape."""

    name: str
    bits: int = 8
    block: tuple[int, int] | None = None


def weight_format(raw: Mapping[str, Any]) -> WeightFormat | None:
    """None for plain weights. Raises ModelError for a form that cannot be read."""
    config = raw.get("quantization_config")
    if not config:
        return None
    method = config.get("quant_method")
    if method == "fp8":
        block = config.get("weight_block_size")
        return WeightFormat("fp8", block=None if block is None else (int(block[0]), int(block[1])))
    if method == "compressed-tensors":
        return _compressed(config)
    raise ModelError(
        f"The checkpoint is quantised by {method}, which cannot be read; these can: {SUPPORTED}.",
        "Serve the unquantised checkpoint (`--quantization int8` rounds it here), or one of those forms.",
    )


def _compressed(config: Mapping[str, Any]) -> WeightFormat:
    forms = {_group(config, group.get("weights") or {}) for group in config.get("config_groups", {}).values()}
    if len(forms) != 1:
        raise ModelError(
            f"The checkpoint has {len(forms)} kinds of quantised weights; one can be read.",
            "Serve a checkpoint that is quantised alike everywhere, or the unquantised one.",
        )
    return forms.pop()


def _group(config: Mapping[str, Any], weights: Mapping[str, Any]) -> WeightFormat:
    form, kind, bits = config.get("format"), weights.get("type"), int(weights.get("num_bits") or 0)
    block = weights.get("block_structure")
    refused = [
        kind == "int" and (form not in _INTEGER_FORMATS or bits not in (4, 8)),
        kind == "float" and (form not in _FLOAT_FORMATS or bits != 8),
        kind not in ("int", "float"),
        not weights.get("symmetric", True),
        weights.get("actorder") not in (None, "weight", "static"),
    ]
    if any(refused):
        symmetry = "symmetric" if weights.get("symmetric", True) else "asymmetric"
        raise ModelError(
            f"The checkpoint's weights are {symmetry} {kind} of {bits} bits ({form}), which cannot be read; "
            f"these can: {SUPPORTED}.",
            "Serve the unquantised checkpoint (`--quantization int8` rounds it here), or one of those forms.",
        )
    return WeightFormat(f"{kind}{bits}", bits, None if block is None else (int(block[0]), int(block[1])))

"""Checkpoints in the quantised forms that can be read, and plain ones with the numbers they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def scales_of(w: torch.Tensor, rows: int, columns: int, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale per block of `rows` by `columns`: as kept, and spread over all numbers."""
    N, K = w.shape
    tiles = torch.zeros(-(-N // rows) * rows, -(-K // columns) * columns)
    tiles[:N, :K] = w.float()
    kept = tiles.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax((1, 3)) / limit
    return kept, kept.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:N, :K]


def fp8(w: torch.Tensor, rows: int, columns: int, name: str = "weight_scale") -> tuple[Tensors, torch.Tensor]:
    kept, spread = scales_of(w, rows, columns, 448.0)
    q = (w.float() / spread).to(torch.float8_e4m3fn)
    return {"weight": q, name: kept}, q.float() * spread


def integers(w: torch.Tensor, columns: int, bits: int, *, packed: bool) -> tuple[Tensors, torch.Tensor]:
    half = 1 << (bits - 1)
    kept, spread = scales_of(w, 1, columns, half - 1)
    # kept in bf16, as is usual
    kept, spread = kept.bfloat16(), spread.bfloat16().float()
    q = (w.float() / spread).round().clamp(-half, half - 1).to(torch.int8)
    stored = {"weight_packed": pack(q, bits)} if packed else {"weight": q}
    return {**stored, "weight_scale": kept}, q.float() * spread


def pack(q: torch.Tensor, bits: int) -> torch.Tensor:
    """By Python's integers: number i of a row in the i-th place from the lowest bit."""
    words = []
    for row in q.tolist():
        whole = sum((value + (1 << (bits - 1))) << (bits * i) for i, value in enumerate(row))
        words.append([whole >> shift & 0xFFFFFFFF for shift in range(0, len(row) * bits, 32)])
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


INT8, INT4 = {"type": "int", "num_bits": 8}, {"type": "int", "num_bits": 4}
FORMS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]]] = {
    "fp8, a tensor": ({"quant_method": "fp8"}, lambda w: fp8(w, *w.shape)),
    "fp8, channels": (
        compressed("float-quantized", type="float", num_bits=8),
        lambda w: fp8(w, 1, w.shape[1]),
    ),
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [40, 32]},
        lambda w: fp8(w, 40, 32, "weight_scale_inv"),
    ),
    "int8, channels": (
        compressed("int-quantized", **INT8),
        lambda w: integers(w, w.shape[1], 8, packed=False),
    ),
    "int8, packed": (
        compressed("pack-quantized", **INT8),
        lambda w: integers(w, w.shape[1], 8, packed=True),
    ),
    "int4, packed in groups": (
        compressed("pack-quantized", **INT4, group_size=32),
        lambda w: integers(w, 32, 4, packed=True),
    ),
}


def write_both(folder: Path, form: str, write: Callable[[Path], Path]) -> tuple[Path, Path]:
    """A quantised checkpoint, and one with the numbers it stands for."""
    config, quantise = FORMS[form]
    source = write(folder / "source")
    stored: Tensors = {}
    widened: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts, meant = quantise(tensor)
            stored |= {name.removesuffix("weight") + key: part.contiguous() for key, part in parts.items()}
            widened[name] = meant.to(tensor.dtype)
        else:
            stored[name] = widened[name] = tensor
    raw = json.loads((source / "config.json").read_text())
    for kind, tensors, extra in (("q", stored, {"quantization_config": config}), ("plain", widened, {})):
        (folder / kind).mkdir()
        save_file(tensors, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps({**raw, **extra}))
    return folder / "q", folder / "plain"

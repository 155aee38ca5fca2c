"""A quantised checkpoint computes what a plain one with the widened numbers does, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engines import write_tiny_llama
from quantised_checkpoints import FORMS, pack, write_both
from safetensors.torch import load_file, save_file
from teacher_forced import make_runner, our_logits
from tiny_families import write_family

from decodefleet.worker.assets.checkpoint import stored_values
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.quantised import WeightFormat
from decodefleet.worker.models.quantised_weights import QuantisedWeights, unpack
from decodefleet.worker.models.weights import CheckpointWeights
from decodefleet.worker.parallel.shard import Part

TOKENS = list(range(3, 40))


@pytest.mark.parametrize("form", FORMS)
def test_as_a_plain_checkpoint(tmp_path: Path, form: str) -> None:
    quantised, plain = write_both(tmp_path, form, write_tiny_llama)
    found, wanted = (
        our_logits(make_runner(folder, "bfloat16"), TOKENS, [16]) for folder in (quantised, plain)
    )
    assert torch.equal(found, wanted)
    source = our_logits(make_runner(tmp_path / "source", "bfloat16"), TOKENS, [16])
    assert not torch.equal(found, source)
    bits = 4 if "int4" in form else 8
    assert stored_values(quantised, bits) >= stored_values(plain)


def test_packed_projections_of_a_quantised_phi3(tmp_path: Path) -> None:
    quantised, plain = write_both(tmp_path, "int8, packed", lambda folder: write_family(folder, "phi3"))
    found, wanted = (
        our_logits(make_runner(folder, "bfloat16"), TOKENS, [16]) for folder in (quantised, plain)
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_are_parts_of_the_whole(tmp_path: Path, form: str, axis: int) -> None:
    quantised, _ = write_both(tmp_path, form, write_tiny_llama)
    config = json.loads((quantised / "config.json").read_text())["quantization_config"]
    block = config.get("weight_block_size")
    weights = QuantisedWeights(
        CheckpointWeights(quantised, torch.bfloat16, torch.device("cpu"), lambda *_: None),
        WeightFormat("", 4 if "int4" in form else 8, tuple(block) if block else None),
    )
    name, shape = "model.layers.0.mlp.gate_proj.weight", (96, 64)
    assert weights.has(name)
    whole = weights.take(name, *shape)
    size = shape[axis]
    for start, stop in ((0, size // 2), (size // 2, size), (3, 21)):
        own = [stop - start if i == axis else n for i, n in enumerate(shape)]
        found = weights.take(name, *own, part=Part(axis, start, stop, size))
        assert torch.equal(found, whole.narrow(axis, start, stop - start))


@pytest.mark.parametrize("bits", [4, 8])
def test_unpacking(bits: int) -> None:
    half = 1 << (bits - 1)
    q = torch.randint(-half, half, (5, 23), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    assert torch.equal(unpack(pack(q, bits), bits, 23), q)


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    quantised, _ = write_both(tmp_path, "int8, channels", write_tiny_llama)
    tensors = load_file(quantised / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight_scale"] = torch.ones(7, 1)
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.weight has scales of shape \[7, 1\]"):
        make_runner(quantised, "bfloat16")


def test_integers_without_scales_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="of type I8 and has no scales"):
        make_runner(folder, "bfloat16")

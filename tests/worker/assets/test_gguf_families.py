"""Checkpoints of the families, written as llama.cpp's converter would, come back and say the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from teacher_forced import make_runner, our_logits
from tiny_families import VOCAB, write_family
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decodefleet.worker.assets.checkpoint import ModelInfo, read_config
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.gguf import convert_gguf
from decodefleet.worker.assets.gguf_rope import rope_scaling
from decodefleet.worker.assets.progress import NoProgress
from decodefleet.worker.text.tokenizer import Tokenizer

# the architecture of GGUF files, by family
ARCHITECTURES = {
    "qwen2-window": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "phi3-partial": gguf.MODEL_ARCH.PHI3,
}
ALPHABET = [chr(c) for c in [*range(0x21, 0x7F)]]
TOKENS = [*ALPHABET, "Ġ", "é"]
Writer = Callable[[gguf.GGUFWriter], None]


def write_gguf(checkpoint: Path, path: Path, architecture: gguf.MODEL_ARCH) -> Path:
    info = read_config(checkpoint)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(info.max_position_embeddings)
    writer.add_block_count(info.layers)
    writer.add_embedding_length(info.hidden_size)
    writer.add_feed_forward_length(info.intermediate_size)
    writer.add_head_count(info.heads)
    writer.add_head_count_kv(info.kv_heads)
    writer.add_layer_norm_rms_eps(info.rms_norm_eps)
    writer.add_rope_freq_base(info.rope.theta)
    if architecture == gguf.MODEL_ARCH.QWEN3:
        writer.add_key_length(info.head_dim)
    if architecture == gguf.MODEL_ARCH.PHI3:
        add_phi3(writer, info)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges([])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(architecture, info.layers)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_phi3(writer: gguf.GGUFWriter, info: ModelInfo) -> None:
    scaling = info.rope.scaling
    assert scaling is not None
    trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    writer.add_rope_dimension_count(int(info.head_dim * info.rope.share))
    writer.add_sliding_window(0)
    writer.add_rope_scaling_orig_ctx_len(trained)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(trained)))
    for kind in ("long", "short"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(scaling[f"{kind}_factor"], np.float32))


def convert(source: Path, folder: Path) -> Path:
    folder.mkdir()
    convert_gguf(source, folder, NoProgress())
    return folder


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_same_weights_and_the_same_logits(tmp_path: Path, family: str) -> None:
    checkpoint = write_family(tmp_path / "checkpoint", family)
    made = convert(write_gguf(checkpoint, tmp_path / "m.gguf", ARCHITECTURES[family]), tmp_path / "made")
    wanted, found = (load_file(folder / "model.safetensors") for folder in (checkpoint, made))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert read_config(made).architecture == read_config(checkpoint).architecture
    # llama.cpp knows no windows of Qwen 2
    if family != "qwen2-window":
        tokens = list(range(3, VOCAB))
        logits = [our_logits(make_runner(folder, "float32"), tokens, [16]) for folder in (checkpoint, made)]
        torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_told_from_its_tensor(factor: float) -> None:
    """The divisors as transformers' own frequencies have them."""
    from transformers import LlamaConfig

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    settings = {"rope_parameters": {**scaling, "rope_theta": 5e5}, "max_position_embeddings": 1 << 17}
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, **settings)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** -(torch.arange(0, 128, 2) / 128)
    divisors = {"rope_freqs.weight": (plain / scaled).numpy()}
    found = rope_scaling(Path("m.gguf"), lambda key: None, divisors, 128, 5e5)
    assert found is not None
    assert found.pop("rope_type") == scaling.pop("rope_type")
    assert found == pytest.approx(scaling, rel=1e-5)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight, which cannot be converted"):
        rope_scaling(Path("m.gguf"), lambda key: None, divisors, 128, 1e4)


def test_phi3_factors_are_the_numbers_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = write_family(tmp_path / "checkpoint", "phi3")
    made = convert(write_gguf(checkpoint, tmp_path / "m.gguf", gguf.MODEL_ARCH.PHI3), tmp_path / "made")
    wanted, found = (read_config(folder).rope.scaling for folder in (checkpoint, made))
    assert wanted is not None
    assert found is not None
    for key in ("short_factor", "long_factor"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-6)
    assert found["factor"] == wanted["factor"]


def test_qwen2_takes_digits_one_by_one_and_composes(tmp_path: Path) -> None:
    checkpoint = write_family(tmp_path / "checkpoint", "qwen2")
    made = convert(write_gguf(checkpoint, tmp_path / "m.gguf", gguf.MODEL_ARCH.QWEN2), tmp_path / "made")
    backend = Tokenizer.from_folder(made)._backend
    assert backend.normalizer.normalize_str("e\u0301") == "\u00e9"
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("I'LL pay 12!?\n\n x")]
    assert pieces == ["I", "'LL", "Ġpay", "Ġ", "1", "2", "!?ĊĊ", "Ġx"]

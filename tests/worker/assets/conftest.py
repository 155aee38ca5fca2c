"""Small models on disk, made on the spot: a folder in Hugging Face form, a GGUF, wheels that carry it."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, CONTEXT = 32, 2, 4, 2, 8, 64, 128
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 256,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MakeFolder = Callable[..., Path]
MakeGguf = Callable[..., Path]
Weights = dict[str, npt.NDArray[np.float32]]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    def make(name: str = "model", **changes: Any) -> Path:
        """changes: of config.json; None removes the key."""
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {"a": np.arange(1024, dtype=np.float32), "b": np.ones((4, 8), np.float16)}
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_weights() -> Weights:
    """A Llama's checkpoint, names and row order as transformers has them."""
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return random.standard_normal((rows, columns), dtype=np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(len(vocabulary()), HIDDEN),
        "model.norm.weight": matrix(1, HIDDEN)[0],
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": matrix(1, HIDDEN)[0],
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.post_attention_layernorm.weight": matrix(1, HIDDEN)[0],
            f"{prefix}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
    return weights


@pytest.fixture
def make_gguf(tmp_path: Path, tiny_weights: Weights) -> MakeGguf:
    def make(
        name: str = "tiny.gguf",
        architecture: str = "llama",
        pre: str = "smollm",
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        extra: Weights | None = None,
        change: Callable[[Weights], Weights] = lambda weights: weights,
        prepare: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    ) -> Path:
        """kind: of the matrices. extra: further tensors, change: the others. prepare: adds settings."""
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        _write_settings(writer, pre)
        prepare(writer)
        for key, weight in (as_llama_cpp(change(tiny_weights)) | (extra or {})).items():
            if weight.ndim == 1:
                writer.add_tensor(key, weight)
            else:
                writer.add_tensor(key, gguf.quantize(weight, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def vocabulary() -> list[str]:
    alphabet = sorted({chr(c) for c in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144)]})
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ĠĠ", "he", "hel"]


def as_llama_cpp(weights: Weights) -> Weights:
    """Names and row order as llama.cpp's converter writes them."""
    names = {
        "model.embed_tokens.": "token_embd.",
        "model.norm.": "output_norm.",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    renamed = {}
    for key, weight in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(key.split(".")[-2])
        if heads:
            shape = (heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
            weight = np.ascontiguousarray(weight.reshape(shape).swapaxes(1, 2)).reshape(weight.shape)
        for theirs, ours in names.items():
            key = key.replace(theirs, ours)
        renamed[key] = weight
    return renamed


def _write_settings(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}<|im_end|>")


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[[str, dict[str, bytes]], Path]:
    """Wheels as pip takes them, in a folder that pip is told to look into."""
    index = tmp_path / "wheels"
    index.mkdir()

    def make(name: str, files: dict[str, bytes]) -> Path:
        info = f"{name}-1.0.dist-info"
        content = files | {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(
            f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},\n"
            for path, data in content.items()
        )
        wheel = index / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, data in content.items():
                archive.writestr(path, data)
            archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
        return wheel

    return make


@pytest.fixture
def only_local_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

"""A Gemma 3 checkpoint, written as llama.cpp's converter would, comes back as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from tiny_gemma3 import write_tiny_gemma3

from decodefleet.worker.assets.checkpoint import read_config
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.gguf import convert_gguf
from decodefleet.worker.assets.progress import NoProgress
from decodefleet.worker.text.detokenizer import IncrementalDetokenizer
from decodefleet.worker.text.tokenizer import Tokenizer

Prepare = Callable[[gguf.GGUFWriter], None]

CONTROL, USER_DEFINED, NORMAL, BYTE = 3, 4, 1, 6
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
DEFINED = ["\n\n", "  ", "   "]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# by falling score
PIECES = [
    "▁t",
    "he",
    "▁the",
    "in",
    "er",
    "世界",
    "ab",
    "bc",
    "▁",
    "t",
    "h",
    "e",
    "i",
    "n",
    "r",
    "世",
    "界",
    "a",
    "b",
    "c",
]
TOKENS = [*SPECIAL, *DEFINED, *BYTES, *PIECES]
TYPES = [CONTROL] * len(SPECIAL) + [USER_DEFINED] * len(DEFINED) + [BYTE] * 256 + [NORMAL] * len(PIECES)
SCORES = [0.0] * (len(TOKENS) - len(PIECES)) + [-float(i) for i in range(len(PIECES))]
TEXTS = ["the inner  abc", " the", "naïve 世界", "👩‍👩‍👧 in", "\n\n\n the   the", "٣ é", ""]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_tiny_gemma3(
        folder,
        vocab_size=len(TOKENS),
        num_hidden_layers=7,
        sliding_window_pattern=6,
        query_pre_attn_scalar=32,
        max_position_embeddings=256,
    )


def write_gguf(checkpoint: Path, path: Path, prepare: Prepare = lambda writer: None) -> Path:
    writer = gguf.GGUFWriter(path, "gemma3")
    info = read_config(checkpoint)
    writer.add_context_length(info.max_position_embeddings)
    writer.add_block_count(info.layers)
    writer.add_embedding_length(info.hidden_size)
    writer.add_feed_forward_length(info.intermediate_size)
    writer.add_head_count(info.heads)
    writer.add_head_count_kv(info.kv_heads)
    writer.add_layer_norm_rms_eps(info.rms_norm_eps)
    writer.add_key_length(info.head_dim)
    writer.add_value_length(info.head_dim)
    writer.add_rope_freq_base(info.rope.theta)
    writer.add_sliding_window(info.raw["sliding_window"])
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_scores(SCORES)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    prepare(writer)
    for name, weight in as_llama_cpp(checkpoint):
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_llama_cpp(checkpoint: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Its names, and norms that are no differences from one."""
    names = {
        "model.embed_tokens.": "token_embd.",
        "model.norm.": "output_norm.",
        "model.layers.": "blk.",
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
    }
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        values = weight.float() + (1 if name.endswith("norm.weight") else 0)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        yield name, values.numpy()


def convert(checkpoint: Path, tmp_path: Path, prepare: Prepare) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    convert_gguf(write_gguf(checkpoint, tmp_path / "tiny.gguf", prepare), folder, NoProgress())
    return folder


def no_prefix(writer: gguf.GGUFWriter) -> None:
    writer.add_add_space_prefix(False)


def test_weights_and_config_come_back(checkpoint: Path, tmp_path: Path) -> None:
    folder = convert(checkpoint, tmp_path, no_prefix)
    found, wanted = (load_file(path / "model.safetensors") for path in (folder, checkpoint))
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name

    def described(path: Path) -> list[Any]:
        info = read_config(path)
        fields = [name for name in type(info).__dataclass_fields__ if name not in ("raw", "eos_token_ids")]
        return [*(getattr(info, name) for name in fields), info.raw["query_pre_attn_scalar"]]

    assert described(folder) == described(checkpoint)
    assert read_config(folder).eos_token_ids == (1,)


def test_what_llama_cpp_leaves_to_its_code_can_be_named(checkpoint: Path, tmp_path: Path) -> None:
    def prepare(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
        writer.add_float32("gemma3.rope.freq_base_swa", 5000.0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    info = read_config(convert(checkpoint, tmp_path, prepare))
    assert [window is None for window in info.layer_windows] == [False, True] * 3 + [False]
    assert (info.window_rope.theta, info.window_rope.scaling) == (5000.0, None)
    assert info.rope.scaling == {"rope_type": "linear", "factor": 8.0}


def test_the_encoder_of_images_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_tensor("v.patch_embd.bias", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"(?s)architecture clip.*encoder of images beside a text model"):
        convert_gguf(tmp_path / "mmproj.gguf", tmp_path, NoProgress())


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(convert(checkpoint, tmp_path_factory.mktemp("tokenizer"), no_prefix))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("the", ["t", "he"]),
        (" the", [" the"]),
        # the better score wins, not the token further left
        ("abc", ["ab", "c"]),
        ("the   in", ["t", "he", "   ", "in"]),
        ("\n\n\n", ["\n\n", "\n"]),
        ("世界世", ["世界", "世"]),
        ("<end_of_turn>in", ["<end_of_turn>", "in"]),
    ],
)
def test_text_is_joined_by_scores(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    assert [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)] == tokens


def test_what_has_no_token_is_spelled_in_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    assert ids == [2, TOKENS.index("<0xC3>"), TOKENS.index("<0xA9>")]
    assert tokenizer.bos_token_id == 2
    assert tokenizer.special_ids == frozenset(range(len(SPECIAL)))


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_returns_the_text_however_it_is_cut(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) + detokenizer.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_text_may_be_read_as_after_a_space(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(convert(checkpoint, tmp_path, lambda writer: None))
    ids = tokenizer.encode("the the", add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == [" the", " the"]
    assert tokenizer.decode(ids) == "the the"


def test_a_chat_models_turns_end_generations(checkpoint: Path, tmp_path: Path) -> None:
    template = "{{ bos_token }}<start_of_turn>{{ messages[0].content }}<end_of_turn>"
    folder = convert(checkpoint, tmp_path, lambda writer: writer.add_chat_template(template))
    assert read_config(folder).eos_token_ids == (1, 5)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 5]
    text = Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == "<bos><start_of_turn>hi<end_of_turn>"

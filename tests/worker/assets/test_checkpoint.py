from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from decodefleet.worker.assets.checkpoint import (
    fingerprint,
    read_config,
    tensor_index,
    weight_bytes,
    weight_files,
)
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.rope import Rope

MakeFolder = Callable[..., Path]


def test_the_real_models_config(smollm2: Path) -> None:
    info = read_config(smollm2)
    assert info.architecture == "LlamaForCausalLM"
    assert (info.layers, info.heads, info.kv_heads, info.head_dim) == (30, 9, 3, 64)
    assert (info.rope, info.rms_norm_eps) == (Rope(100_000.0), 1e-5)
    assert (info.tie_word_embeddings, info.dtype, info.eos_token_ids) == (True, "bfloat16", (2,))
    assert weight_bytes(smollm2) == 269_030_016


def test_defaults_where_the_config_is_silent(make_folder: MakeFolder) -> None:
    info = read_config(
        make_folder(num_key_value_heads=None, rope_theta=None, torch_dtype=None, bos_token_id=None)
    )
    assert (info.kv_heads, info.head_dim, info.rope) == (4, 8, Rope(10_000.0))
    assert (info.dtype, info.bos_token_id) == (None, None)
    assert info.layer_windows == (None,) * info.layers


def test_what_a_family_leaves_out_is_known(make_folder: MakeFolder) -> None:
    left_out = {"tie_word_embeddings": None, "rope_theta": None}
    llama = read_config(make_folder(**left_out))
    assert (llama.tie_word_embeddings, llama.window_rope) == (False, Rope(10_000.0))
    changes = {"model_type": "gemma3_text", "sliding_window": 64, "num_hidden_layers": 7, **left_out}
    gemma = read_config(make_folder(**changes))
    assert (gemma.tie_word_embeddings, gemma.head_dim) == (True, 256)
    assert (gemma.rope, gemma.window_rope) == (Rope(1_000_000.0), Rope(10_000.0))
    assert gemma.layer_windows == (64, 64, 64, 64, 64, None, 64)


def test_end_tokens_of_generation_config_come_first(make_folder: MakeFolder) -> None:
    folder = make_folder(eos_token_id=[2, 7])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2], "bos_token_id": 5}))
    info = read_config(folder)
    assert (info.eos_token_ids, info.bos_token_id) == ((9, 2, 7), 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "has 1 layer_types for 2 layers"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"rope_theta": "1e4"}, "rope_theta must be a positive number"),
        ({"vision_config": {}}, "only text models"),
    ],
)
def test_what_is_wrong_with_a_config_is_said(
    make_folder: MakeFolder, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(make_folder(**changes))


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_the_names_of_older_configurations(tmp_path: Path) -> None:
    fields = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": None, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **fields}))
    info = read_config(tmp_path)
    assert (info.hidden_size, info.layers, info.heads, info.kv_heads, info.head_dim) == (64, 3, 4, 4, 16)
    assert (info.max_position_embeddings, info.intermediate_size) == (128, 256)


def shard(folder: Path) -> list[Path]:
    """Split the folder's weights into two files with an index."""
    (folder / "model.safetensors").unlink()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    save_file({"a": np.zeros(10, np.float32)}, folder / names["a"])
    save_file({"b": np.zeros(20, np.float16)}, folder / names["b"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return [folder / name for name in names.values()]


def test_single_and_sharded_weights(make_folder: MakeFolder) -> None:
    folder = make_folder()
    assert weight_files(folder) == [folder / "model.safetensors"]
    files = shard(folder)
    assert weight_files(folder) == files
    assert {name: entry.file for name, entry in tensor_index(folder).items()} == dict(
        zip("ab", files, strict=True)
    )


def test_a_missing_shard_is_named(make_folder: MakeFolder) -> None:
    folder = make_folder()
    shard(folder)[1].unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files: model-00002-of-00002\.safetensors"):
        weight_files(folder)


def test_an_index_cannot_lead_out_of_the_folder(make_folder: MakeFolder) -> None:
    folder = make_folder()
    index = {"weight_map": {"a": "../model/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside the folder"):
        weight_files(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"(?s)pickled.*save_pretrained"):
        weight_files(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no weights"):
        weight_files(tmp_path)


def test_the_index_tells_where_bytes_lie(make_folder: MakeFolder) -> None:
    folder = make_folder()
    entry = tensor_index(folder)["a"]
    assert (entry.dtype, entry.shape, entry.nbytes) == ("F32", (1024,), 4096)
    data = entry.file.read_bytes()[entry.begin : entry.end]
    assert np.array_equal(np.frombuffer(data, np.float32), np.arange(1024, dtype=np.float32))
    assert weight_bytes(folder) == 4096 + 64


def test_the_fingerprint_is_of_the_content_alone(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder()
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    (copy / "README.md").write_text("a file that changes nothing")
    assert fingerprint(copy) == fingerprint(folder)
    assert len(fingerprint(folder)) == 32


def test_the_fingerprint_changes_with_config_and_weights(make_folder: MakeFolder) -> None:
    prints = {fingerprint(make_folder("one")), fingerprint(make_folder("two", rope_theta=2e4))}
    folder = make_folder("three")
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert len(prints | {fingerprint(folder)}) == 3

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from decodefleet.worker.assets.builtin import BUILTIN_MODELS
from decodefleet.worker.assets.checkpoint import read_config
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.gguf import convert_gguf, to_bf16
from decodefleet.worker.assets.packages import fetch
from decodefleet.worker.assets.progress import NoProgress
from decodefleet.worker.text.tokenizer import Tokenizer

MakeGguf = Callable[..., Path]
Weights = dict[str, Any]

VARIED_TEXTS = [
    "Hello, world! It's 12345 o'clock; 3.14 isn't 22/7.",
    "  leading, trailing  \n\n\t tabs\r\n",
    "naïve café, 你好世界, مرحبا, 👩‍👩‍👧‍👦",
    "def f(x):\n    return {'a': [1, 2]}  # <|im_end|>",
    "<|im_start|>user\nhi<|im_end|>\n",
]


def convert(source: Path, folder: Path) -> Path:
    folder.mkdir()
    convert_gguf(source, folder, NoProgress())
    return folder


@given(st.lists(st.floats(width=32)))
def test_rounding_to_bf16_is_torchs(values: list[float]) -> None:
    fp32 = np.array(values, np.float32)
    ours = torch.from_numpy(to_bf16(fp32).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), torch.from_numpy(fp32).isnan())
    assert torch.equal(ours.nan_to_num(), torch.from_numpy(fp32).to(torch.bfloat16).nan_to_num())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_weights_come_back_under_their_names_and_in_their_order(
    make_gguf: MakeGguf, tmp_path: Path, tiny_weights: Weights, kind: str
) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    folder = convert(make_gguf(kind=quantization), tmp_path / "out")
    converted = load_file(folder / "model.safetensors")
    assert set(converted) == set(tiny_weights)
    for name, weight in tiny_weights.items():
        # rows are quantised one by one, so that their order and quantisation commute
        expected = gguf.dequantize(gguf.quantize(weight, quantization), quantization)
        fp32 = torch.from_numpy(weight if weight.ndim == 1 else expected)
        assert torch.equal(converted[name], fp32.to(torch.bfloat16)), name


def test_the_config_is_the_checkpoints(make_gguf: MakeGguf, tmp_path: Path) -> None:
    info = read_config(convert(make_gguf(), tmp_path / "out"))
    assert info.architecture == "LlamaForCausalLM"
    assert (info.hidden_size, info.intermediate_size, info.layers) == (32, 64, 2)
    assert (info.heads, info.kv_heads, info.head_dim) == (4, 2, 8)
    assert (info.rms_norm_eps, info.rope.theta, info.max_position_embeddings) == (1e-5, 1e4, 128)
    assert info.tie_word_embeddings
    assert info.dtype == "bfloat16"


def test_the_end_of_a_turn_ends_a_generation(make_gguf: MakeGguf, tmp_path: Path) -> None:
    folder = convert(make_gguf(), tmp_path / "out")
    # the file names <|endoftext|> alone, and its template writes <|im_end|>
    assert read_config(folder).eos_token_ids == (0, 2)


def test_an_untied_head_stays_untied(make_gguf: MakeGguf, tmp_path: Path, tiny_weights: Weights) -> None:
    head = tiny_weights["model.embed_tokens.weight"] + 1
    folder = convert(make_gguf(extra={"output.weight": head}), tmp_path / "out")
    assert not read_config(folder).tie_word_embeddings
    converted = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(converted, torch.from_numpy(head).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [("smollm", ["hel", "ĠĠ", "1", "2"]), ("gpt-2", ["hel", "Ġ", "Ġ", "1", "2"])],
)
def test_text_is_split_as_the_file_names_it(
    make_gguf: MakeGguf, tmp_path: Path, pre: str, tokens: list[str]
) -> None:
    folder = convert(make_gguf(pre=pre), tmp_path / "out")
    ids = Tokenizer.from_folder(folder).encode("hel  12")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    names = {i: token for token, i in vocabulary.items()}
    assert [names[i] for i in ids] == tokens


def test_bos_is_added_where_the_file_says_so(make_gguf: MakeGguf, tmp_path: Path) -> None:
    source = make_gguf(prepare=lambda writer: writer.add_add_bos_token(True))
    tokenizer = Tokenizer.from_folder(convert(source, tmp_path / "out"))
    assert tokenizer.encode("he")[0] == tokenizer.bos_token_id == 1
    assert len(tokenizer.encode("he")) == 2
    assert tokenizer._backend.encode("he").ids == tokenizer.encode("he")


def test_an_unknown_architecture_is_named(make_gguf: MakeGguf, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"architecture mamba.*llama"):
        convert(make_gguf(architecture="mamba"), tmp_path / "out")


def test_a_tensor_that_would_be_lost_is_an_error(make_gguf: MakeGguf, tmp_path: Path) -> None:
    source = make_gguf(extra={"rope_freqs.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight, which cannot be converted"):
        convert(source, tmp_path / "out")


def without_layer_1(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if ".layers.1." not in name}


def test_a_file_that_lacks_tensors_is_refused(make_gguf: MakeGguf, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks 9 tensors.*model\.layers\.1\.input_layernorm"):
        convert(make_gguf(change=without_layer_1), tmp_path / "out")


def test_one_part_of_a_split_file_says_how_to_join_them(make_gguf: MakeGguf, tmp_path: Path) -> None:
    source = make_gguf(change=without_layer_1, prepare=lambda w: w.add_uint16("split.count", 2))
    with pytest.raises(ModelError, match=r"(?s)one of 2 parts.*llama-gguf-split"):
        convert(source, tmp_path / "out")


def test_scaled_rotary_embeddings_are_refused(make_gguf: MakeGguf, tmp_path: Path) -> None:
    source = make_gguf(prepare=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN))
    with pytest.raises(ModelError, match=r"rotary embedding \(yarn\)"):
        convert(source, tmp_path / "out")


def test_an_unknown_split_is_refused(make_gguf: MakeGguf, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gpt2 \(exotic\).*smollm"):
        convert(make_gguf(pre="exotic"), tmp_path / "out")


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.99])
def test_a_truncated_file_says_so(make_gguf: MakeGguf, tmp_path: Path, share: float) -> None:
    source = make_gguf()
    content = source.read_bytes()
    source.write_bytes(content[: max(8, int(len(content) * share))])
    with pytest.raises(ModelError, match="truncated or damaged"):
        convert(source, tmp_path / "out")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"PK\x03\x04 not what its name says")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        convert(source, tmp_path / "out")


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "smollm2.gguf"
    fetch(BUILTIN_MODELS["smollm2-135m"], path, NoProgress())
    return path


@pytest.mark.slow
def test_the_real_weights_are_transformers_own(smollm2: Path, smollm2_gguf: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        shape = LlamaForCausalLM(LlamaConfig.from_pretrained(smollm2))
    theirs = load_gguf_checkpoint(str(smollm2_gguf), return_tensors=True, model_to_load=shape)["tensors"]
    ours = load_file(smollm2 / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, weight in ours.items():
        assert (weight.float() - theirs[name].to(torch.bfloat16).float()).abs().max() == 0.0, name


@pytest.mark.slow
def test_the_real_tokenizer_is_transformers_own_but_for_spaces_before_digits(
    smollm2: Path, smollm2_gguf: Path
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    ours = Tokenizer.from_folder(smollm2)
    for text in VARIED_TEXTS:
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text), False) == text
    # transformers ignores the split that the file names; the original model's is digits first
    text = "x  1"
    assert [ours.token_text(i) for i in ours.encode(text)] == ["x", "  ", "1"]
    assert theirs.convert_ids_to_tokens(theirs(text).input_ids) == ["x", "Ġ", "Ġ", "1"]

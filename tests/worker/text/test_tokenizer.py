from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import AutoTokenizer

from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.text.detokenizer import IncrementalDetokenizer
from decodefleet.worker.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "Hello, world!",
    "  two spaces  and\ttabs\n\nand lines ",
    "1234567 in 2024: ½ and ²",
    "def f(x):\n    return x  # 12",
    "naïve café, 你好世界, 👩‍👩‍👧‍👦",
    "<|im_start|>user\nhi<|im_end|>",
    "don't it's I'll",
]


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers_does(
    smollm2: Path, smollm2_tokenizer: Tokenizer, text: str
) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2)
    ids = theirs(text).input_ids
    assert smollm2_tokenizer.encode(text) == ids
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_what_the_model_says_of_its_tokens(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.vocab_size == 49_152
    assert smollm2_tokenizer.bos_token_id == 1
    assert smollm2_tokenizer.eos_token_ids == (2,)
    assert smollm2_tokenizer.special_ids == frozenset(range(17))


def test_bos_comes_first_where_the_model_wants_it(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("a")[0] == sentencepiece.bos_token_id == 1
    assert 1 not in sentencepiece.encode("a", add_special_tokens=False)


def test_never_truncates_or_pads(sentencepiece_backend: Backend) -> None:
    backend = Backend.from_str(sentencepiece_backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer(backend).encode("!" * 100)) == 101


def test_bytes_of_tokens(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert [byte_level.token_bytes(i) for i in byte_level.encode("é ")] == [b"\xc3", b"\xa9", b" "]
    assert byte_level.token_text(byte_level.encode("é")[0]) == "\ufffd"
    assert [sentencepiece.token_bytes(i) for i in sentencepiece.encode("a世\n", False)] == [
        b" a",
        "世".encode(),
        b"\n",
    ]


def test_a_lone_surrogate_is_the_callers_error(smollm2_tokenizer: Tokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        smollm2_tokenizer.encode("\ud800")


def test_a_folder_without_tokenizer_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(backend)


def test_end_tokens_of_all_files_are_joined(smollm2: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(smollm2 / name, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (0, 5, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [9259, 236764, 1902, 236888]),
        ("a   b", [236746, 139, 236763]),
        ("世界 emoji 👩", [12811, 64334, 236743, 243767]),
        ("\n\n\n def f(x):", [109, 1096, 517, 236769, 236781, 1473]),
        ("<start_of_turn>user\n", [105, 2364, 107]),
    ],
)
def test_a_large_sentencepiece_vocabulary(gemma3_270m: Path, text: str, ids: list[int]) -> None:
    """As sentencepiece itself splits them."""
    tokenizer = Tokenizer.from_folder(gemma3_270m)
    assert tokenizer.encode(text) == [2, *ids]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    streamed = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(streamed.push([token]) for token in ids) + streamed.finish() == text

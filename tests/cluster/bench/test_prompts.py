from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Plain
from tokenizers import decoders, models, pre_tokenizers

from decodefleet.cluster.bench.prompts import Words
from decodefleet.cluster.bench.workload import Synthetic
from decodefleet.worker.text.tokenizer import Tokenizer


def test_text_has_exactly_so_many_tokens_and_shares_its_prefix(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_folder(smollm2)
    make = Words("seed", tokenizer)
    shape = Synthetic(input_len=100, output_len=1, prefix_len=64, prefix_groups=2)
    texts = [make(request) for request in shape.requests("run", 6)]
    ids = [tokenizer.encode(text) for text in texts]
    assert [len(prompt) for prompt in ids] == [100] * 6
    assert len({tuple(prompt[:64]) for prompt in ids}) == 2
    assert len(set(texts)) == 6
    assert texts == [Words("seed", tokenizer)(request) for request in shape.requests("run", 6)]


def test_a_tokenizer_without_words_is_refused(tmp_path: Path) -> None:
    letters = {chr(97 + index): index for index in range(26)}
    plain = Plain(models.WordLevel(letters | {"?": 26}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.decoder = decoders.ByteLevel()
    plain.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="no words of one token"):
        Words("seed", Tokenizer.from_folder(tmp_path))

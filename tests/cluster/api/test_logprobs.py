"""Log-probabilities in OpenAI's forms, where tokens are not whole characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from decodefleet.cluster.api.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from decodefleet.worker.protocol import TokenLogprobs
from decodefleet.worker.text.tokenizer import Tokenizer

TEXT = "a 🎉 naïve 你好"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


def entries(tokens: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -0.5, 1, (7, 8), (-0.1, float("-inf"))) for token in tokens]


def test_labels_tell_parts_of_characters_apart(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    logprobs = completion_logprobs(tokenizer, entries(tokens), range(len(tokens)))
    parts = [label for label in logprobs.tokens if label.startswith("bytes:")]
    assert parts
    assert all("\ufffd" not in label for label in logprobs.tokens)
    assert logprobs.top_logprobs is not None
    # the chosen token is always among the best, and JSON can hold all of it
    for label, best in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert best is not None
        assert best[label] == -0.5
        assert min(best.values()) == -9999.0


def test_bytes_of_a_chat_add_up_to_its_text(tokenizer: Tokenizer) -> None:
    content = chat_logprobs(tokenizer, entries(tokenizer.encode(TEXT))).content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == TEXT
    assert {len(entry.top_logprobs) for entry in content} == {2}
    assert {top.logprob for entry in content for top in entry.top_logprobs} == {-0.1, -9999.0}


def test_an_echoed_prompt_counts_characters(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    logprobs = prompt_logprobs(tokenizer, tokens, entries(tokens[1:]))
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.text_offset) == len(logprobs.tokens) == len(tokens)
    for label, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not label.startswith("bytes:"):
            assert TEXT[offset : offset + len(label)] == label

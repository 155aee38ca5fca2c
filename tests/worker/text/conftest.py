"""Tokenizers in the forms that models have: the real one, and small ones built on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from decodefleet.worker.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


@pytest.fixture(scope="session")
def smollm2_backend(smollm2: Path) -> Backend:
    return Backend.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="session")
def sentencepiece_backend() -> Backend:
    """As Llama 2 and Mistral have it: byte fallback, ▁ for spaces, one leading space added and removed."""
    words = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "世", "▁▁", "!", "�"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for word in words:
        vocab[word] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b"), ("▁", "▁")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return backend


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_backend: Backend) -> Tokenizer:
    return Tokenizer(sentencepiece_backend, named={"bos_token": "<s>", "eos_token": "</s>"}, add_bos=True)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """256 byte tokens and no merges: each character beyond ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)

"""Decoders without a family here: transformers' code over our paged cache says what transformers says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_engine, make_submit, run_all
from teacher_forced import make_runner, our_logits, their_logits
from tiny_families import SHAPE, VOCAB, WINDOW, write_random
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    MambaConfig,
    Olmo2Config,
    PreTrainedConfig,
    StableLmConfig,
)

from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.sampling_params import SamplingParams

# logits that are scaled behind the head, windows in some layers, positions that are embedded, partial rotary
OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt-neox": lambda: GPTNeoXConfig(**{**SHAPE, "num_key_value_heads": 2}),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "stablelm": lambda: StableLmConfig(**SHAPE),
    "granite": lambda: GraniteConfig(**SHAPE, logits_scaling=3.0, attention_multiplier=0.3),
    "cohere2": lambda: Cohere2Config(**SHAPE, sliding_window=WINDOW, sliding_window_pattern=2),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_positions=512, bos_token_id=1, eos_token_id=2
    ),
}
PROMPT, DECODES = 70, 32
CUTS = {"whole": [], "odd": [1, 2, 24, 47], "decodes": [PROMPT, *range(PROMPT + 1, PROMPT + DECODES)]}


def tokens_of(count: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, VOCAB, (count,), generator=generator).tolist()
    return tokens


def write(folder: Path, name: str) -> Path:
    return write_random(folder, OTHERS[name](), torch.float32)


@pytest.mark.parametrize("name", OTHERS)
def test_logits_agree_in_fp32(tmp_path: Path, name: str) -> None:
    folder, tokens = write(tmp_path, name), tokens_of(PROMPT + DECODES)
    theirs = their_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokens)
    runner = make_runner(folder, "float32")
    for label, cuts in CUTS.items():
        if label == "decodes" and name not in ("gpt-neox", "cohere2"):
            continue
        ours = our_logits(runner, tokens, cuts)
        torch.testing.assert_close(
            ours, theirs, atol=1e-3, rtol=1e-4, msg=lambda text, label=label: f"{label}: {text}"
        )


@pytest.mark.parametrize("name", ["gpt-neox", "cohere2"])
def test_greedy_texts_in_a_batch_with_shared_prefixes(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunked, batched, the second time from the cache; each as transformers generates it alone."""
    folder = write(tmp_path, name)
    engine = make_engine(folder, max_num_batched_tokens=32, blocks=96)
    assert "has no family of its own" in caplog.text
    assert not engine.card.batch_invariant
    shared = tokens_of(40)
    prompts = [shared + tokens_of(5 + 7 * i, seed=i) for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=DECODES, ignore_eos=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for turn in range(2):
        for i, prompt in enumerate(prompts):
            engine.submit(make_submit(f"{turn}-{i}", prompt, params))
        outcomes = run_all(engine)
        for i, prompt in enumerate(prompts):
            theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=DECODES)
            assert outcomes[f"{turn}-{i}", 0].tokens == theirs[0, len(prompt) :].tolist(), (turn, i)
    assert engine.stats().prefix_hit_tokens > 40


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"quantization": "int8"}, "--quantization"),
        ({"batch_invariant": True}, "--batch-invariant"),
        ({"tiers": {"window": 32}}, "--window"),
    ],
)
def test_what_transformers_code_cannot_do_is_refused(
    tmp_path: Path, options: dict[str, Any], flag: str
) -> None:
    with pytest.raises(ModelError, match=rf"GPTNeoXForCausalLM runs by transformers' code.*{flag}"):
        make_engine(write(tmp_path, "gpt-neox"), **options)


def test_attention_that_does_not_pass_through_the_interface_is_refused(tmp_path: Path) -> None:
    """At load, before any request."""
    folder = write_random(
        tmp_path, BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=2), torch.float32
    )
    with pytest.raises(ModelError, match="Bloom"):
        make_engine(folder)


def test_no_decoder_at_all(tmp_path: Path) -> None:
    folder = write_random(
        tmp_path, MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2), torch.float32
    )
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        make_engine(folder)

"""What rounding costs the real model: perplexity, and how often the likeliest token stays the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import make_engine, make_submit, run_all

from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parent / "models" / "texts.txt"
# perplexity over that of bf16: of the cache, then of the weights
KV_LIMITS = {"int8": 1.005, "fp8": 1.01}
WEIGHTS_LIMIT = 1.01
SCORING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)


@dataclass(frozen=True)
class Scores:
    """Of a text's tokens but the first: log-probabilities, and the likeliest token in the place of each."""

    logprobs: list[float]
    likeliest: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: Scores) -> float:
        pairs = zip(self.likeliest, other.likeliest, strict=True)
        return sum(a == b for a, b in pairs) / len(self.likeliest)


def score(folder: Path, **options: Any) -> Scores:
    """The texts in a row, so that most tokens have a long context, read in chunks from the cache."""
    prompt = Tokenizer.from_folder(folder).encode(TEXTS.read_text())
    engine = make_engine(folder, blocks=256, max_num_batched_tokens=256, max_model_len=4096, **options)
    engine.submit(make_submit("text", prompt, SCORING))
    entries = run_all(engine)["text", 0].deltas[0].prompt_logprobs or ()
    assert len(entries) == len(prompt) - 1
    return Scores([entry.logprob for entry in entries], [entry.top_tokens[0] for entry in entries])


@pytest.fixture(scope="module")
def in_bf16(smollm2: Path) -> Scores:
    return score(smollm2)


def report(capsys: pytest.CaptureFixture[str], what: str, found: Scores, wanted: Scores) -> None:
    more = found.perplexity / wanted.perplexity - 1
    with capsys.disabled():
        print(
            f"\n{what}: perplexity {found.perplexity:.3f} ({more:+.3%}) on {len(wanted.logprobs)} tokens, "
            f"the same likeliest token at {found.agreement(wanted):.1%}"
        )


@pytest.mark.parametrize("kv_cache_dtype", KV_LIMITS)
def test_quantised_cache(
    smollm2: Path, in_bf16: Scores, capsys: pytest.CaptureFixture[str], kv_cache_dtype: str
) -> None:
    found = score(smollm2, kv_cache_dtype=kv_cache_dtype)
    report(capsys, f"KV in {kv_cache_dtype}", found, in_bf16)
    assert found.logprobs != in_bf16.logprobs
    assert found.perplexity < in_bf16.perplexity * KV_LIMITS[kv_cache_dtype]


def test_quantised_weights(smollm2: Path, in_bf16: Scores, capsys: pytest.CaptureFixture[str]) -> None:
    found = score(smollm2, quantization="int8")
    report(capsys, "weights in int8", found, in_bf16)
    assert found.logprobs != in_bf16.logprobs
    assert found.perplexity < in_bf16.perplexity * WEIGHTS_LIMIT

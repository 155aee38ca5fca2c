"""Against transformers, teacher-forced, past the window; and what cannot be run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import make_engine, make_submit, run_all
from teacher_forced import make_runner, our_logits, their_logits
from tiny_gemma3 import VOCAB, WINDOW, write_tiny_gemma3
from transformers import AutoModelForCausalLM

from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.sampling_params import SamplingParams

PROMPT, DECODES = 100, 32


def tokens_of(count: int) -> list[int]:
    tokens: list[int] = torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    return tokens


@pytest.mark.parametrize(
    "cuts",
    [[], [WINDOW], [1, 2, 3], [16, 32, 80], [15, 31, 47], [PROMPT, *range(PROMPT + 1, PROMPT + DECODES)]],
    ids=["whole", "at the window", "ones", "blocks", "odd", "prefill, then decodes"],
)
def test_tiny_model_agrees_in_fp32(tiny_gemma3: Path, cuts: list[int]) -> None:
    tokens = tokens_of(PROMPT + DECODES)
    ours = our_logits(make_runner(tiny_gemma3, "float32"), tokens, cuts)
    theirs = their_logits(AutoModelForCausalLM.from_pretrained(tiny_gemma3, dtype=torch.float32), tokens)
    torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=1e-4)


def test_the_window_is_seen(tiny_gemma3: Path, tmp_path: Path) -> None:
    """With full attention everywhere the same weights say something else, from the window on."""
    full = write_tiny_gemma3(tmp_path, layer_types=["full_attention"] * 6)
    tokens = tokens_of(PROMPT)
    windowed, everything = (
        our_logits(make_runner(folder, "float32"), tokens, []) for folder in (tiny_gemma3, full)
    )
    assert (windowed - everything)[WINDOW:].abs().max() > 0.1


def test_greedy_text_is_transformers_own(tmp_path: Path) -> None:
    """Decoded with a cache on both sides, from a prompt longer than the window."""
    folder = write_tiny_gemma3(tmp_path, dtype=torch.float32)
    prompt = tokens_of(WINDOW + 9)
    engine = make_engine(folder)
    params = SamplingParams(temperature=0.0, max_tokens=DECODES, ignore_eos=True)
    engine.submit(make_submit("r", prompt, params))
    ours = run_all(engine)["r", 0].tokens
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).generate(
        torch.tensor([prompt]), do_sample=False, min_new_tokens=DECODES, max_new_tokens=DECODES
    )
    assert ours == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_what_gemma_2_has_is_refused(tmp_path: Path, key: str) -> None:
    folder = write_tiny_gemma3(tmp_path, **{key: 50.0})
    with pytest.raises(ModelError, match=rf"{key} = 50\.0, which is not supported"):
        make_runner(folder, "float32")

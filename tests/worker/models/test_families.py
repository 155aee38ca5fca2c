"""Every family against transformers, teacher-forced and greedy: whole, in chunks and token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import make_engine, make_submit, run_all
from teacher_forced import make_runner, our_logits, their_logits
from tiny_families import FAMILIES, TRAINED, VOCAB, WINDOW, write_family
from transformers import AutoModelForCausalLM

from decodefleet.worker.sampling_params import SamplingParams

PROMPT, DECODES = 100, 32
CUTS = {
    "whole": [],
    "blocks": [16, 32, 80],
    "odd": [1, 2, WINDOW, 47],
    "prefill, then decodes": [PROMPT, *range(PROMPT + 1, PROMPT + DECODES)],
}


def tokens_of(count: int) -> list[int]:
    tokens: list[int] = torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_in_fp32(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family)
    tokens = tokens_of(PROMPT + DECODES)
    theirs = their_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokens)
    runner = make_runner(folder, "float32")
    for name, cuts in CUTS.items():
        ours = our_logits(runner, tokens, cuts)
        torch.testing.assert_close(
            ours, theirs, atol=3e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_transformers_own(tmp_path: Path, family: str) -> None:
    """Decoded with a cache on both sides, from a prompt that is longer than window and trained length."""
    folder = write_family(tmp_path, family, dtype=torch.float32)
    prompt = tokens_of(TRAINED + 9)
    engine = make_engine(folder)
    params = SamplingParams(temperature=0.0, max_tokens=DECODES, ignore_eos=True)
    engine.submit(make_submit("r", prompt, params))
    ours = run_all(engine)["r", 0].tokens
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=DECODES)
    assert ours == theirs[0, len(prompt) :].tolist()


def test_phi3_within_the_trained_length(tmp_path: Path) -> None:
    """Served with no longer sequences it has the short factors, as transformers has for a short prompt."""
    folder = write_family(tmp_path, "phi3")
    tokens = tokens_of(TRAINED - 10)
    theirs = their_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokens)
    short, long = (make_runner(folder, "float32", max_tokens=limit) for limit in (TRAINED, TRAINED + 1))
    torch.testing.assert_close(our_logits(short, tokens, [16]), theirs, atol=3e-4, rtol=1e-4)
    assert (our_logits(long, tokens, [16]) - theirs).abs().max() > 0.1


def test_keys_turned_by_other_factors_have_other_names(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "phi3")
    roots = {make_engine(folder, max_model_len=limit).card.hash_root for limit in (TRAINED, TRAINED + 1, 500)}
    assert len(roots) == 2

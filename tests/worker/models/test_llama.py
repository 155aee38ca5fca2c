"""Against transformers on the same bf16 weights, teacher-forced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import write_tiny_llama
from teacher_forced import make_runner, our_logits, their_logits
from transformers import AutoModelForCausalLM

from decodefleet.worker.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parent / "texts.txt"
POSITIONS = 64
# against fp32 arithmetic on the same weights; bf16 activations leave this much
MEAN_TOLERANCE, MAX_TOLERANCE = 0.12, 1.5
# where the runner-up is so close to the winner, rounding may decide
EPSILON = 0.25


def texts(folder: Path) -> Iterator[list[int]]:
    tokenizer = Tokenizer.from_folder(folder)
    for text in TEXTS.read_text().split("\n----\n"):
        tokens = tokenizer.encode(text.strip())
        assert len(tokens) >= POSITIONS, f"only {len(tokens)} tokens: {text[:40]}"
        yield tokens[:POSITIONS]


def test_real_model_agrees_at_1280_positions(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nearer to transformers in fp32 than transformers in bf16 is, and with the same choices."""
    runner = make_runner(smollm2, "bfloat16")
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    errors, their_errors, excused, unsure = [], [], 0, 0
    for tokens in texts(smollm2):
        ours, wanted = our_logits(runner, tokens, [17, 18, 40]), their_logits(exact, tokens)
        errors.append((ours - wanted).abs())
        their_errors.append((their_logits(rounded, tokens) - wanted).abs())
        best = wanted.topk(2).values
        differs, close = ours.argmax(-1) != wanted.argmax(-1), best[:, 0] - best[:, 1] < EPSILON
        assert not (differs & ~close).any(), "another token where transformers is sure"
        excused, unsure = excused + int(differs.sum()), unsure + int(close.sum())
    error, their_error = torch.cat(errors), torch.cat(their_errors)
    with capsys.disabled():
        print(
            f"\n{len(error)} positions against transformers in fp32 on the same bf16 weights: "
            f"mean |Δlogit| {error.mean():.4f}, max {error.max():.3f} "
            f"(transformers in bf16: {their_error.mean():.4f}, {their_error.max():.3f}); argmax differs at "
            f"{excused}, all among the {unsure} where the top two lie within {EPSILON}"
        )
    assert len(error) == 1280
    assert error.mean() < MEAN_TOLERANCE
    assert error.max() < MAX_TOLERANCE
    assert error.mean() < their_error.mean()


@pytest.mark.parametrize("cuts", [[], [1, 2, 3], [16, 32], [15, 31, 47]])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 32), (2, 32), (1, 80)])
def test_tiny_model_agrees_in_fp32(tmp_path: Path, cuts: list[int], kv_heads: int, head_dim: int) -> None:
    folder = write_tiny_llama(tmp_path, kv_heads=kv_heads, head_dim=head_dim)
    tokens = torch.randint(3, 90, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    ours = our_logits(make_runner(folder, "float32"), tokens, cuts)
    theirs = their_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokens)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("cuts", [[], [16, 17, 40], [*range(60, 100)]])
def test_windows_agree_in_fp32(tiny_mistral: Path, tiny_hybrid: Path, cuts: list[int]) -> None:
    """A hundred tokens past windows of 24, in chunks and one by one."""
    tokens = torch.randint(3, 90, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    for folder in (tiny_mistral, tiny_hybrid):
        ours = our_logits(make_runner(folder, "float32"), tokens, cuts)
        theirs = their_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokens)
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)

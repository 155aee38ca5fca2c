"""Attention sinks and a window: generation without a limit of length, in constant memory."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from all_ways import GREEDY, PIPELINED, SEEDED, check_all_ways
from engines import VOCAB, make_engine, make_submit, run_all, write_tiny_hybrid, write_tiny_llama
from teacher_forced import make_runner, our_logits, their_logits
from transformers import AutoModelForCausalLM

from decodefleet.kernels import ops
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.config import CacheConfig
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parent / "models" / "texts.txt"
WINDOW, SINKS = 50, 20
IN_SIGHT = {"window": WINDOW, "attention_sinks": SINKS}


def prompt_of(length: int, seed: int = 2) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("position", [3, WINDOW + SINKS - 1, WINDOW + SINKS, 200, 399])
def test_one_layer_is_the_plain_model_on_sinks_and_window(tmp_path: Path, position: int) -> None:
    """With one layer, a token's logits are those behind a short text: the sinks, then the window."""
    folder = write_tiny_llama(tmp_path, layers=1)
    tokens = prompt_of(400)
    runner = make_runner(folder, "float32", **IN_SIGHT)
    ours = our_logits(runner, tokens, [64, 128, 129, 130, 300])[position]
    window = range(max(position - WINDOW + 1, SINKS), position + 1)
    seen = [*tokens[: min(SINKS, position + 1)], *(tokens[i] for i in window)]
    theirs = their_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), seen)[-1]
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "runner"),
    [
        (GREEDY, {}),
        (SEEDED, {}),
        (GREEDY, PIPELINED),
        (SEEDED, PIPELINED),
        (SEEDED, {"kv_cache_dtype": "int8"}),
    ],
    ids=["greedy", "seeded", "greedy, pipelined", "seeded, pipelined", "seeded, int8"],
)
def test_one_text_whatever_the_cache_holds(
    tiny_llama: Path, options: dict[str, Any], runner: dict[str, Any]
) -> None:
    """Prompts of which most slid out of sight, past the points where lists drop entries."""
    shared = prompt_of(1200)
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, **options)
    lengths = (10, 65, 500, 560, 600, 1200)
    jobs = [(shared[:length] + prompt_of(9, seed=length), params) for length in lengths]
    check_all_ways(
        tiny_llama, jobs, blocks=300, tight=10, max_num_batched_tokens=16, tiers=IN_SIGHT, **runner
    )


@pytest.mark.parametrize("sinks", [0, SINKS])
@pytest.mark.parametrize("pattern", ["ff", "sffs"])
def test_what_was_dropped_changes_no_bit(tmp_path: Path, pattern: str, sinks: int) -> None:
    """A long generation against the whole text computed at once, with the block lists whole."""
    folder = write_tiny_hybrid(tmp_path, window=24, pattern=pattern)
    in_sight = {"window": WINDOW, "attention_sinks": sinks}
    engine = make_engine(folder, blocks=40, max_num_batched_tokens=32, tiers=in_sight)
    prompt, output = prompt_of(40), 1300
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=output, ignore_eos=True, logprobs=0)
    engine.submit(make_submit("r", prompt, params))
    outcome = run_all(engine)["r", 0]
    assert len(outcome.tokens) == output
    tokens = prompt + outcome.tokens
    logits = our_logits(make_runner(folder, "bfloat16", len(tokens), **in_sight), tokens, [700])
    wanted = ops.token_logprobs(logits[len(prompt) - 1 : -1], torch.tensor(outcome.tokens), 0)
    told = torch.tensor([entry.logprob for delta in outcome.deltas for entry in delta.logprobs or ()])
    assert torch.equal(told, wanted.logprob_R)


def test_memory_is_constant_and_nothing_bounds_the_length(tiny_llama: Path) -> None:
    """Twice the positions that the model was made for, in a pool of what one sequence takes."""
    needed = 2 + 7
    engine = make_engine(tiny_llama, blocks=needed, max_num_batched_tokens=32, tiers=IN_SIGHT)
    assert engine.card.max_model_len > 10**9
    params = SamplingParams(temperature=0.0, max_tokens=1100, ignore_eos=True, frequency_penalty=0.1)
    engine.submit(make_submit("r", prompt_of(100), params))
    used = set()
    while engine.has_work():
        engine.step()
        stats = engine.stats()
        used.add(stats.total_blocks - stats.free_blocks - stats.cached_blocks)
        engine.check_integrity()
    assert max(used) <= needed
    assert engine.stats().generated_tokens == 1100
    with pytest.raises(ModelError, match="takes 9 KV blocks"):
        make_engine(tiny_llama, blocks=needed - 1, max_num_batched_tokens=32, tiers=IN_SIGHT)


def test_the_real_model_reads_on_with_sinks_and_is_lost_without(
    smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Short texts in a row, so that little is lost with what slid out of sight."""
    prompt = Tokenizer.from_folder(smollm2).encode(TEXTS.read_text())[:1000]
    full, sinks, window = (
        perplexity(smollm2, prompt, in_sight)
        for in_sight in ({}, {"window": 380, "attention_sinks": 4}, {"window": 384})
    )
    with capsys.disabled():
        print(
            f"\nperplexity on {len(prompt)} tokens: {full:.2f} with full context, {sinks:.2f} with 4 sinks "
            f"and a window of 380, {window:.2f} with a window of 384 alone"
        )
    assert sinks < 1.05 * full
    assert window > 1.2 * full


def perplexity(folder: Path, prompt: list[int], in_sight: dict[str, Any]) -> float:
    engine = make_engine(folder, blocks=128, max_num_batched_tokens=256, max_model_len=2048, tiers=in_sight)
    engine.submit(make_submit("r", prompt, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    entries = run_all(engine, check=False)["r", 0].deltas[0].prompt_logprobs or ()
    return math.exp(-sum(entry.logprob for entry in entries) / len(entries))


def test_other_sinks_are_another_cache(tiny_llama: Path) -> None:
    roots = {
        make_engine(tiny_llama, tiers=in_sight).card.hash_root
        for in_sight in ({}, {"window": 64}, {"window": 48}, {"window": 48, "attention_sinks": 4})
    }
    assert len(roots) == 4


def test_a_limit_can_still_be_given(tiny_llama: Path) -> None:
    assert make_engine(tiny_llama, tiers=IN_SIGHT, max_model_len=700).card.max_model_len == 700


def test_what_cannot_be_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match="attention_sinks need a window"):
        CacheConfig(attention_sinks=4)
    with pytest.raises(ModelError, match="put 514 tokens in sight; the model was made for 512"):
        make_engine(tiny_llama, tiers={"window": 500, "attention_sinks": 14})

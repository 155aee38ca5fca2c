"""One request, one text: bit for bit, whatever the cache holds and whoever else is in the batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engines import VOCAB, make_engine, make_submit, run_all

from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.text.tokenizer import Tokenizer

GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "seed": 11}
PENALISED = {
    "temperature": 0.7,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "seed": 5,
}
TEXTS = [
    "The capital of France is",
    "def quicksort(items):\n    ",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "Q: Why is the sky blue?\nA:",
    "Die Katze sitzt auf dem Tisch und",
    "1, 1, 2, 3, 5, 8, 13,",
    "In 1969 the first people walked on the Moon. " * 6,
    "水は",
]

Result = list[tuple[list[int], list[object]]]


def generate(
    folder: Path, prompts: list[list[int]], params: SamplingParams, *, alone: bool, **options: Any
) -> tuple[Result, int]:
    """Tokens and logprobs per prompt, and preemptions, from one engine that sees the prompts together or
    one after the other."""
    engine = make_engine(folder, **options)
    outcomes = {}
    for i, prompt in enumerate(prompts):
        engine.submit(make_submit(str(i), prompt, params))
        if alone:
            outcomes.update(run_all(engine, check=False))
    outcomes.update(run_all(engine, check=False))
    ordered = (outcomes[str(i), 0] for i in range(len(prompts)))
    return [
        (outcome.tokens, [entry for delta in outcome.deltas for entry in delta.logprobs or ()])
        for outcome in ordered
    ], engine.stats().preemptions


def check_all_ways(
    folder: Path, prompts: list[list[int]], params: SamplingParams, *, blocks: int, tight: int
) -> None:
    """Cold and alone is the truth; chunks, batches, prefix hits and preemption must not change a bit."""

    def run(ps: list[list[int]], *, alone: bool, blocks: int = blocks, **options: Any) -> tuple[Result, int]:
        return generate(folder, ps, params, alone=alone, blocks=blocks, max_num_seqs=16, **options)

    wanted, _ = run(prompts, alone=True, prefix_caching=False, max_num_batched_tokens=512)
    assert run(prompts, alone=False, max_num_batched_tokens=512)[0] == wanted, "in a batch"
    assert run(prompts, alone=False, max_num_batched_tokens=32)[0] == wanted, "in chunks, in a batch"
    # asked twice of one engine: the second time from the cache
    assert run(prompts * 2, alone=True, max_num_batched_tokens=32)[0] == wanted * 2, "in chunks, then cached"
    squeezed, preemptions = run(prompts, alone=False, blocks=tight)
    assert squeezed == wanted, "preempted"
    assert preemptions > 0


@pytest.mark.parametrize("options", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_tiny_model(tiny_llama: Path, options: dict[str, Any]) -> None:
    rng = random.Random(1)
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    prompts = [shared[: 7 * i] + [rng.randrange(3, VOCAB) for _ in range(5 + 3 * i)] for i in range(8)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, **options)
    check_all_ways(tiny_llama, prompts, params, blocks=96, tight=10)


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_real_model(smollm2: Path, options: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_folder(smollm2)
    prompts = [tokenizer.encode(start + text) for start in ("", "Note. ") for text in TEXTS]
    params = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2, **options)
    check_all_ways(smollm2, prompts, params, blocks=256, tight=12)

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
Job = tuple[list[int], SamplingParams]


def generate(folder: Path, jobs: list[Job], *, alone: bool, **options: Any) -> tuple[Result, int]:
    """Tokens and logprobs per job, and preemptions, from one engine that sees the jobs together or one
    after the other."""
    engine = make_engine(folder, max_num_seqs=16, **options)
    outcomes = {}
    for i, (prompt, params) in enumerate(jobs):
        engine.submit(make_submit(str(i), prompt, params))
        if alone:
            outcomes.update(run_all(engine, check=False))
    outcomes.update(run_all(engine, check=False))
    ordered = (outcomes[str(i), 0] for i in range(len(jobs)))
    return [
        (outcome.tokens, [entry for delta in outcome.deltas for entry in delta.logprobs or ()])
        for outcome in ordered
    ], engine.stats().preemptions


def check_all_ways(folder: Path, jobs: list[Job], *, blocks: int, tight: int) -> None:
    """Cold and alone is the truth; chunks, batches, prefix hits and preemption must not change a bit."""
    whole, chunked = {"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 32}
    wanted, _ = generate(folder, jobs, alone=True, blocks=blocks, prefix_caching=False, **whole)
    assert generate(folder, jobs, alone=False, blocks=blocks, **whole)[0] == wanted, "in a batch"
    assert generate(folder, jobs, alone=False, blocks=blocks, **chunked)[0] == wanted, "in chunks, in a batch"
    # asked twice of one engine: the second time from the cache
    twice = generate(folder, jobs * 2, alone=True, blocks=blocks, **chunked)[0]
    assert twice == wanted * 2, "in chunks, then cached"
    squeezed, preemptions = generate(folder, jobs, alone=False, blocks=tight)
    assert squeezed == wanted, "preempted"
    assert preemptions > 0


@pytest.mark.parametrize("options", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_tiny_model(tiny_llama: Path, options: dict[str, Any]) -> None:
    rng = random.Random(1)
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    prompts = [shared[: 7 * i] + [rng.randrange(3, VOCAB) for _ in range(5 + 3 * i)] for i in range(8)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, **options)
    check_all_ways(tiny_llama, [(prompt, params) for prompt in prompts], blocks=96, tight=10)


def test_real_model(smollm2: Path) -> None:
    """Sixteen prompts, half of them greedy, each of a length that needs a new block at once."""
    tokenizer = Tokenizer.from_folder(smollm2)
    jobs = []
    for options in (GREEDY, SEEDED):
        params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, **options)
        for text in TEXTS:
            prompt = tokenizer.encode(text)
            padding = tokenizer.encode("\n")[:1] * (-(len(prompt) + 1) % 16)
            jobs.append((padding + prompt, params))
    check_all_ways(smollm2, jobs, blocks=256, tight=8)

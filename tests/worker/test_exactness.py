"""One request, one text: bit for bit, whatever the cache holds and whoever else is in the batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from all_ways import (
    GREEDY,
    PENALISED,
    PIPELINED,
    PLAIN,
    SEEDED,
    Job,
    check_all_ways,
    check_without_preemption,
    generate,
)
from engines import VOCAB, make_engine, make_submit, run_all, write_tiny_hybrid, write_tiny_llama
from neighbours import neighbours, run_until_idle
from tiny_families import write_family

from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.text.tokenizer import Tokenizer

# of one log-probability, bf16 arithmetic in two different orders on a random model
GPU_TOLERANCE = 0.25
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


def tiny_jobs(options: dict[str, Any]) -> list[Job]:
    rng = random.Random(1)
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    prompts = [shared[: 7 * i] + [rng.randrange(3, VOCAB) for _ in range(5 + 3 * i)] for i in range(8)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, **options)
    return [(prompt, params) for prompt in prompts]


@pytest.mark.parametrize("runner", [{}, PIPELINED], ids=["one step at a time", "pipelined, padded"])
@pytest.mark.parametrize("options", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_tiny_model(tiny_llama: Path, options: dict[str, Any], runner: dict[str, Any]) -> None:
    check_all_ways(tiny_llama, tiny_jobs(options), blocks=96, tight=10, **runner)


@pytest.mark.parametrize("runner", [{}, PIPELINED], ids=["one step at a time", "pipelined, padded"])
@pytest.mark.parametrize("options", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_moved_to_another_worker(tiny_llama: Path, options: dict[str, Any], runner: dict[str, Any]) -> None:
    """After every number of tokens: what follows is the same, in one batch on an engine that saw none."""
    jobs = [job for job in tiny_jobs(options) if len(job[0]) < 40][:2]
    wanted, _ = generate(tiny_llama, jobs, alone=True, blocks=96, **PLAIN)
    engine = make_engine(tiny_llama, blocks=96, max_num_seqs=16, max_waiting=999, **runner)
    for number, (prompt, params) in enumerate(jobs):
        tokens = wanted[number][0]
        for cut in range(1, len(tokens)):
            known = (tuple(tokens[:cut]),)
            engine.submit(make_submit(f"{number} {cut}", prompt, params, attempt=1, resume=known))
    for (name, _), outcome in run_all(engine).items():
        number, cut = map(int, name.split())
        tokens, scores = wanted[number]
        assert outcome.tokens == tokens[cut:], name
        assert [entry for delta in outcome.deltas for entry in delta.logprobs or ()] == scores[cut:], name


@pytest.mark.parametrize("runner", [{}, PIPELINED], ids=["one step at a time", "pipelined, padded"])
@pytest.mark.parametrize("options", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_fetched_from_another_worker(
    tiny_llama: Path, options: dict[str, Any], runner: dict[str, Any]
) -> None:
    """All at once, by an engine that computes no full block of a prompt that another has."""
    jobs = tiny_jobs(options)
    wanted, _ = generate(tiny_llama, jobs, alone=True, blocks=96, **PLAIN)
    with neighbours(tiny_llama, blocks=96, max_num_seqs=16, **runner) as (owner, other):
        for asked, peer in ((owner, None), (other, owner.peer(99))):
            for number, (prompt, params) in enumerate(jobs):
                asked.submit(str(number), prompt, params, peer)
            found = run_until_idle([owner, other])
            for number, (tokens, scores) in enumerate(wanted):
                outcome = found[str(number), 0]
                assert outcome.tokens == tokens
                assert [entry for delta in outcome.deltas for entry in delta.logprobs or ()] == scores
        assert other.fetched > 0


def test_ranks(tiny_llama: Path) -> None:
    """Among two ranks: alone and eager, together and recorded, and swapped to both ranks' memory."""
    check_all_ways(tiny_llama, tiny_jobs(SEEDED), blocks=96, tight=10, tensor_parallel_size=2)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_tiny_model_with_a_quantised_cache(tiny_llama: Path, kv_cache_dtype: str) -> None:
    """A token reads what was stored of the keys and values in its own chunk too, so chunks change nothing."""
    check_all_ways(tiny_llama, tiny_jobs(GREEDY), blocks=96, tight=10, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("runner", [{}, PIPELINED], ids=["one step at a time", "pipelined, padded"])
@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("model", "blocks", "tight"), [("mistral", 96, 6), ("hybrid", 288, 18), ("gemma3", 288, 18)]
)
def test_windows(
    tiny_mistral: Path,
    tiny_hybrid: Path,
    tiny_gemma3: Path,
    model: str,
    blocks: int,
    tight: int,
    options: dict[str, Any],
    runner: dict[str, Any],
) -> None:
    """Most of each sequence lies beyond the window of 24 tokens."""
    folder = {"mistral": tiny_mistral, "hybrid": tiny_hybrid, "gemma3": tiny_gemma3}[model]
    # chunks of 16 tokens, so that a window's memory is small
    check_all_ways(
        folder, tiny_jobs(options), blocks=blocks, tight=tight, **runner, max_num_batched_tokens=16
    )


@pytest.mark.parametrize("family", ["qwen2-window", "qwen3", "qwen3-moe", "mixtral", "phi3-partial"])
def test_families(tmp_path: Path, family: str) -> None:
    """Biases, norms of heads, experts, packed projections and heads of which a part turns."""
    folder = write_family(tmp_path, family)
    # two groups where there are two rules of windows; small chunks, so that a window's memory is small
    pool = {"blocks": 192, "tight": 12, "max_num_batched_tokens": 16}
    check_all_ways(
        folder, tiny_jobs(SEEDED), **(pool if family == "qwen2-window" else {"blocks": 96, "tight": 10})
    )


@pytest.mark.parametrize("options", [{"quantization": "int8"}, PIPELINED], ids=["int8", "pipelined, padded"])
def test_experts(tmp_path: Path, options: dict[str, Any]) -> None:
    """Rounded, and chosen by recorded steps, whose padding meets experts as well."""
    folder = write_family(tmp_path, "qwen3-moe")
    check_all_ways(folder, tiny_jobs(GREEDY), blocks=96, tight=10, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("options", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_tiny_model_on_a_gpu(tmp_path: Path, options: dict[str, Any], graphs: bool) -> None:
    folder = write_tiny_llama(tmp_path, head_dim=64)
    runner = {"device": "cuda", "batch_invariant": True, "enforce_eager": not graphs}
    check_all_ways(folder, tiny_jobs(options), blocks=96, tight=10, **runner)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_quantised_cache_on_a_gpu(tmp_path: Path, kv_cache_dtype: str) -> None:
    folder = write_tiny_llama(tmp_path, head_dim=64)
    options = {"device": "cuda", "batch_invariant": True, "kv_cache_dtype": kv_cache_dtype}
    check_all_ways(folder, tiny_jobs(SEEDED), blocks=96, tight=10, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("in_sight", [{}, {"window": 40, "attention_sinks": 20}], ids=["hybrid", "sinks"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_windows_on_a_gpu(tmp_path: Path, graphs: bool, in_sight: dict[str, int]) -> None:
    folder = write_tiny_hybrid(tmp_path, window=24, head_dim=64)
    runner = {"device": "cuda", "batch_invariant": True, "enforce_eager": not graphs, "tiers": in_sight}
    check_all_ways(folder, tiny_jobs(SEEDED), blocks=288, tight=18, **runner, max_num_batched_tokens=16)


@pytest.mark.gpu
def test_without_invariance_a_gpu_stays_within_tolerance(tmp_path: Path) -> None:
    """The same prompts scored alone in chunks on CPU, and together on the GPU."""
    folder = write_tiny_llama(tmp_path, head_dim=64)
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    jobs = [(prompt, scoring) for prompt, _ in tiny_jobs(GREEDY)]
    wanted = scores(folder, jobs)
    got = scores(folder, jobs, device="cuda", batch_invariant=False)
    differences = [abs(a - b) for a, b in zip(wanted, got, strict=True)]
    assert max(differences) < GPU_TOLERANCE


def scores(folder: Path, jobs: list[Job], **options: Any) -> list[float]:
    """Log-probability of every prompt token."""
    engine = make_engine(folder, max_num_seqs=16, **options)
    for i, (prompt, params) in enumerate(jobs):
        engine.submit(make_submit(str(i), prompt, params))
    outcomes = run_all(engine)
    return [
        entry.logprob
        for i in range(len(jobs))
        for entry in outcomes[str(i), 0].deltas[0].prompt_logprobs or ()
    ]


@pytest.mark.slow
def test_real_hybrid_model(gemma3_270m: Path) -> None:
    """Prompts longer than the window of 512 tokens, beside short ones."""
    tokenizer = Tokenizer.from_folder(gemma3_270m)
    long = tokenizer.encode("In 1969 the first people walked on the Moon. They were home a week later. " * 32)
    jobs = [
        (prompt, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, **options))
        for options in (GREEDY, SEEDED)
        for prompt in (long[:600], tokenizer.encode(TEXTS[0]), long[:530] + tokenizer.encode(TEXTS[1]))
    ]
    check_without_preemption(gemma3_270m, jobs, blocks=1600)


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

"""One request, one text: runs jobs in all the ways that must not change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import make_engine, make_submit, run_all

from decodefleet.worker.protocol import WorkerStats
from decodefleet.worker.sampling_params import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "seed": 11}
PENALISED = {
    "temperature": 0.7,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "seed": 5,
}
# on CUDA the defaults; on CPU the same code with results that come one step late, and padded batches
PIPELINED = {"async_scheduling": True, "enforce_eager": False}
PLAIN = {"async_scheduling": False, "enforce_eager": True, "max_num_batched_tokens": 512}

Result = list[tuple[list[int], list[object]]]
Job = tuple[list[int], SamplingParams]


# more than any of the jobs needs; brought back whatever that takes
MEMORY = {"cpu_kv_gib": 0.25, "kv_restore": "always"}


def generate(folder: Path, jobs: list[Job], *, alone: bool, **options: Any) -> tuple[Result, WorkerStats]:
    """Tokens and logprobs per job, and the statistics of the one engine that saw the jobs together or one
    after the other."""
    engine = make_engine(folder, max_num_seqs=16, **options)
    outcomes = {}
    for i, (prompt, params) in enumerate(jobs):
        engine.submit(make_submit(str(i), prompt, params))
        if alone:
            outcomes.update(run_all(engine, check=False))
    outcomes.update(run_all(engine, check=False))
    ordered = (outcomes[str(i), 0] for i in range(len(jobs)))
    engine.close()
    return [
        (outcome.tokens, [entry for delta in outcome.deltas for entry in delta.logprobs or ()])
        for outcome in ordered
    ], engine.stats()


def check_all_ways(folder: Path, jobs: list[Job], *, blocks: int, tight: int, **options: Any) -> None:
    """Chunks, batches, prefix hits, preemption and swapping must not change a bit, nor must `options`."""
    wanted = check_without_preemption(folder, jobs, blocks=blocks, **options)
    squeezed, stats = generate(folder, jobs, alone=False, blocks=tight, **options)
    assert squeezed == wanted, "preempted"
    assert stats.preemptions > 0
    below = {**options, "tiers": {**options.get("tiers", {}), **MEMORY}}
    swapped, stats = generate(folder, jobs, alone=False, blocks=tight, **below)
    assert swapped == wanted, "swapped out and in"
    assert stats.swapped > 0
    assert stats.tiers["cpu"].restored_blocks > 0


def check_without_preemption(folder: Path, jobs: list[Job], *, blocks: int, **options: Any) -> Result:
    """Cold, alone and one step at a time is the truth."""
    plain = {**options, **PLAIN}
    wanted, _ = generate(folder, jobs, alone=True, blocks=blocks, prefix_caching=False, **plain)
    whole, chunked = {**options, "max_num_batched_tokens": 512}, {"max_num_batched_tokens": 32, **options}
    assert generate(folder, jobs, alone=False, blocks=blocks, **whole)[0] == wanted, "in a batch"
    assert generate(folder, jobs, alone=False, blocks=blocks, **chunked)[0] == wanted, "in chunks, in a batch"
    # asked twice of one engine: the second time from the cache
    twice = generate(folder, jobs * 2, alone=True, blocks=blocks, **chunked)[0]
    assert twice == wanted * 2, "in chunks, then cached"
    return wanted

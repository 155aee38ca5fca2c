"""A model on several ranks says what it says on one: real processes, one model of random weights each."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engines import Outcome, make_engine, make_submit, run_all
from quantised_checkpoints import write_both
from tiny_families import FAMILIES, SHAPE, VOCAB, write_random
from tiny_gemma3 import write_tiny_gemma3
from transformers import LlamaConfig

from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.engine import Engine
from decodefleet.worker.engine_api import RankLost
from decodefleet.worker.runner import rank_model
from decodefleet.worker.sampling_params import SamplingParams

# of a log-probability in fp32: terms of sums are added in another order
TOLERANCE = 1e-3
# the Llama has 4 heads and 2 KV heads, the others 2 and 1
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {}),
    ("llama", 4, {}),
    ("llama", 2, {"kv_cache_dtype": "int8", "tiers": {"window": 64, "attention_sinks": 4}}),
    ("gemma3", 2, {}),
    ("phi3", 2, {"async_scheduling": True}),
    ("qwen2", 2, {}),
    ("qwen3", 2, {}),
    ("qwen3-moe", 2, {}),
    ("mixtral", 2, {}),
    ("llama in int4, packed in groups", 2, {}),
    ("qwen3-moe in fp8, blocks", 2, {}),
]


def write(folder: Path, model: str = "llama") -> Path:
    model, _, form = model.partition(" in ")
    if form:
        return write_both(folder, form, lambda source: write(source, model))[0]
    if model == "gemma3":
        return write_tiny_gemma3(folder, dtype=torch.float32)
    # of one token more than ranks can share evenly
    llama = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB + 1}
    config = LlamaConfig(**{**SHAPE, **llama}) if model == "llama" else FAMILIES[model]()
    return write_random(folder, config, torch.float32)


@contextmanager
def engine_of(folder: Path, ranks: int, **options: Any) -> Iterator[Engine]:
    before = {child.pid for child in psutil.Process().children()}
    engine = make_engine(folder, blocks=96, tensor_parallel_size=ranks, **options)
    try:
        yield engine
    finally:
        engine.close()
        left = {child.pid for child in psutil.Process().children()}
        assert left <= before, "a rank outlived its engine"


def jobs() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of several chunks, of which two share a prefix; greedy, scored, penalised, and forked."""
    tokens = torch.randint(3, VOCAB, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    plain: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True, "logprobs": 3}
    return [
        (tokens[:100], SamplingParams(temperature=0.0, **plain)),
        (tokens[:70], SamplingParams(temperature=0.0, prompt_logprobs=3, **plain)),
        (tokens[200:221], SamplingParams(temperature=0.0, frequency_penalty=0.5, **plain)),
        (tokens[100:109], SamplingParams(temperature=0.8, seed=3, n=3, **plain)),
    ]


def run(engine: Engine, *, alone: bool) -> dict[tuple[str, int], Outcome]:
    outcomes: dict[tuple[str, int], Outcome] = {}
    for i, (prompt, params) in enumerate(jobs()):
        engine.submit(make_submit(str(i), prompt, params))
        if alone:
            outcomes |= run_all(engine)
    return outcomes | run_all(engine)


def entries(outcome: Outcome) -> list[Any]:
    return [
        entry
        for delta in outcome.deltas
        for entry in (*(delta.prompt_logprobs or ()), *(delta.logprobs or ()))
    ]


@pytest.mark.parametrize(("model", "ranks", "options"), CASES, ids=lambda value: str(value))
def test_ranks_agree_with_one(tmp_path: Path, model: str, ranks: int, options: dict[str, Any]) -> None:
    folder = write(tmp_path, model)
    with engine_of(folder, 1, **options) as single:
        wanted = run(single, alone=False)
    with engine_of(folder, ranks, **options) as engine:
        got = run(engine, alone=False)
        # from the cache for the most part: a hit is a hit on all ranks
        hits = engine.stats().prefix_hit_tokens
        again = run(engine, alone=True)
        assert engine.stats().prefix_hit_tokens > hits + 100
    for key, outcome in wanted.items():
        assert got[key].tokens == outcome.tokens
        for ours, theirs in zip(entries(got[key]), entries(outcome), strict=True):
            assert abs(ours.logprob - theirs.logprob) < TOLERANCE
            assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=TOLERANCE)
        # among as many ranks, not a bit depends on who else is in the batch and what was cached
        assert again[key].tokens == got[key].tokens
        assert [entry.logprob for entry in entries(again[key])] == [
            entry.logprob for entry in entries(got[key])
        ]


def test_a_killed_rank_ends_the_gang(tmp_path: Path) -> None:
    with engine_of(write(tmp_path), 2) as engine:
        engine.submit(make_submit("r", [5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True)))
        assert engine.step()
        (rank,) = _ranks()
        rank.send_signal(signal.SIGKILL)
        with pytest.raises(RankLost):
            run_all(engine, check=False)


def test_a_rank_that_hangs_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_model, "PATIENCE_S", 1.0)
    with engine_of(write(tmp_path), 2) as engine:
        engine.submit(make_submit("r", [5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True)))
        assert engine.step()
        (rank,) = _ranks()
        rank.send_signal(signal.SIGSTOP)
        with pytest.raises(RankLost):
            run_all(engine, check=False)


def test_what_ranks_cannot_do_is_said_before_they_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be divided among 3 ranks"):
        make_engine(write(tmp_path), tensor_parallel_size=3)
    assert not _ranks()


def _ranks() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children() if "decodefleet.worker.follower" in child.cmdline()
    ]

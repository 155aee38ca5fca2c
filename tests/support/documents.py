"""Documents that are asked about again and again, of an engine whose pool holds few of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from engines import VOCAB, Outcome, make_submit, run_all

from decodefleet.worker.engine import Engine
from decodefleet.worker.sampling_params import SamplingParams

# of the tiny model: 16 tokens, 2 layers, 1 KV head, 32 numbers of bf16, keys and values
SLAB_BYTES = 16 * 2 * 32 * 2 * 2
DOCUMENT = 160
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)


def gib(blocks: int) -> float:
    return blocks * SLAB_BYTES / (1 << 30)


def cpu_tier(blocks: int = 1024) -> dict[str, Any]:
    return {"cpu_kv_gib": gib(blocks), "kv_restore": "always"}


def nvme_tier(folder: Path, blocks: int = 1024, *, cpu: int = 0) -> dict[str, Any]:
    nvme = {"nvme_kv_path": folder, "nvme_kv_gib": gib(blocks)}
    return {**nvme, "cpu_kv_gib": gib(cpu), "kv_restore": "always"}


def documents(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB) for _ in range(DOCUMENT)] for _ in range(count)]


def ask(engine: Engine, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> Outcome:
    engine.submit(make_submit(name, prompt, params))
    return run_all(engine)[name, 0]


def answers(engine: Engine, prompts: list[list[int]], visits: int = 2) -> list[list[Outcome]]:
    """All prompts in turn, again and again."""
    return [
        [ask(engine, f"{visit}-{i}", prompt) for i, prompt in enumerate(prompts)] for visit in range(visits)
    ]


def said(outcome: Outcome) -> tuple[list[int], list[object]]:
    return outcome.tokens, [entry for delta in outcome.deltas for entry in delta.logprobs or ()]


def cached(outcome: Outcome) -> int:
    tokens = outcome.deltas[0].cached_tokens
    assert tokens is not None
    return tokens

"""Documents asked in turn, with a main pool that holds a quarter of them: computed, then brought back.

    python tests/bench/kv_tiers.py [--model smollm2-135m] [--documents 20] [--tokens 2000] [--folder DIR]

Three engines, one after the other: with an endless pool, whose answers are the truth; with a small pool and a
tier in host memory; and with a tier on disk (in `--folder`, or a temporary folder), where the process is
killed with SIGKILL between the visits. Every document is asked twice. Prints a line of JSON for each tier.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodefleet.worker.assets.resolve import resolve_model
from decodefleet.worker.config import CacheConfig, EngineConfig, ModelConfig
from decodefleet.worker.engine import Engine
from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.protocol import Submit, Tier
from decodefleet.worker.sampling_params import SamplingParams

BLOCK = 16
ANSWER = 16


@dataclass
class Visit:
    """One question: seconds to its first token, prompt tokens found in the cache, and the answer."""

    first_token_s: float
    cached: int
    tokens: list[int]


class Silent:
    """Nobody asks which blocks the engine holds."""

    def kv_stored(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        pass

    def kv_removed(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        pass

    def kv_cleared(self) -> None:
        pass


def documents(count: int, length: int, vocab: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(100, vocab) for _ in range(length)] for _ in range(count)]


def make_engine(folder: Path, blocks: int, tiers: dict[str, Any]) -> Engine:
    cache = CacheConfig(num_gpu_blocks_override=blocks, **tiers)
    config = EngineConfig(model=ModelConfig(folder=folder, served_name="m"), cache=cache)
    return Engine(config, Silent(), lambda *_: None)


def ask(engine: Engine, prompt: list[int], number: int) -> Visit:
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    began, first, cached = time.perf_counter(), 0.0, 0
    engine.submit(
        Submit(request_id=str(number), incarnation="", epoch=0, prompt=pack_tokens(prompt), params=params)
    )
    tokens: list[int] = []
    while len(tokens) < ANSWER:
        for delta in engine.step():
            first = first or time.perf_counter() - began
            cached = delta.cached_tokens or cached
            tokens += delta.tokens
    return Visit(first, cached, tokens)


def visit_all(engine: Engine, prompts: list[list[int]]) -> list[Visit]:
    visits = [ask(engine, prompt, number) for number, prompt in enumerate(prompts)]
    # until all that is worth it is saved
    while engine.has_work():
        engine.step()
    return visits


def first_visits_of_a_killed_process(options: argparse.Namespace, tiers: dict[str, Any]) -> list[Visit]:
    command = [sys.executable, __file__, "--child", json.dumps({"options": vars(options), "tiers": tiers})]
    killed = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.returncode
    return [Visit(**each) for each in json.loads(killed.stdout)]


def child(message: str) -> None:
    told = json.loads(message)
    options = argparse.Namespace(**told["options"])
    folder, prompts = prepare(options)
    visits = visit_all(make_engine(folder, small_pool(options), told["tiers"]), prompts)
    print(json.dumps([vars(each) for each in visits]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def prepare(options: argparse.Namespace) -> tuple[Path, list[list[int]]]:
    folder = resolve_model(options.model).folder
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    return folder, documents(options.documents, options.tokens, vocab)


def blocks_of(options: argparse.Namespace) -> int:
    return -(-(options.tokens + ANSWER) // BLOCK)


def small_pool(options: argparse.Namespace) -> int:
    return blocks_of(options) * max(options.documents // 4, 1)


def summary(
    name: str, visits: list[list[Visit]], truth: list[Visit], options: argparse.Namespace
) -> dict[str, Any]:
    """of_computing: first token of the second visit over that of the first, which computes."""
    first, second = (statistics.median(each.first_token_s for each in visit) for visit in visits)
    full = (options.tokens - 1) // BLOCK * BLOCK
    return {
        "tier": name,
        "first_visit_ms": round(1e3 * first, 1),
        "second_visit_ms": round(1e3 * second, 1),
        "of_computing": round(second / first, 4),
        "full_blocks_found": round(sum(each.cached for each in visits[1]) / (full * len(visits[1])), 4),
        "same_answers": all([v.tokens for v in visit] == [v.tokens for v in truth] for visit in visits),
    }


def compare(options: argparse.Namespace, tier_gib: float = 4.0) -> list[dict[str, Any]]:
    folder, prompts = prepare(options)
    endless = make_engine(folder, blocks_of(options) * options.documents + 64, {})
    truth = visit_all(endless, prompts)
    endless.close()

    engine = make_engine(folder, small_pool(options), {"cpu_kv_gib": tier_gib})
    visits = [visit_all(engine, prompts) for _ in range(2)]
    rows = [summary("host memory", visits, truth, options)]
    engine.close()
    with tempfile.TemporaryDirectory(dir=options.folder) as disk:
        on_disk = {"nvme_kv_path": disk, "nvme_kv_gib": tier_gib}
        first = first_visits_of_a_killed_process(options, on_disk)
        engine = make_engine(folder, small_pool(options), on_disk)
        visits = [first, visit_all(engine, prompts)]
        rows.append(summary("disk, killed in between", visits, truth, options))
        engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child)
    for row in compare(options):
        print(json.dumps(row), flush=True)
    return None


if __name__ == "__main__":
    main()

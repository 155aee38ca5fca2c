"""Generation without end: memory, step time and perplexity with attention sinks and a window.

    python tests/bench/endless.py [--model smollm2-135m] [--sinks 4] [--window 1020] [--tokens 20000]

First a long text within the trained length is scored with full context, with sinks and window, and with the
window alone. Then one sequence is generated, and of each thousand tokens the blocks in use, the resident
memory and the mean time of a step are told. The text is this project's own documentation unless files are
given. Prints Markdown; measure on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.llm import LLM, SamplingParams
from decodefleet.worker.protocol import Submit

ROOT = Path(__file__).parents[2]
TEXT = sorted((ROOT / "deploy" / "docs" / "decisions").glob("*.md"))
EVERY = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--window", type=int, default=1020)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--text", type=Path, nargs="*", default=TEXT)
    parser.add_argument("--text-tokens", type=int, default=6000)
    options = parser.parse_args()
    text = "\n\n".join(path.read_text() for path in options.text)
    with_sinks = {"window": options.window, "attention_sinks": options.sinks}
    kinds = {
        "full context": {},
        f"{options.sinks} sinks and a window of {options.window}": with_sinks,
        f"a window of {options.window + options.sinks} alone": {"window": options.window + options.sinks},
    }
    print("| attention | perplexity | behind the window |\n|---|---|---|")
    for name, kind in kinds.items():
        whole, behind = perplexity(options.model, text, options.text_tokens, options.window, kind)
        print(f"| {name} | {whole:.3f} | {behind:.3f} |", flush=True)
    print("\n| tokens | blocks in use | resident MiB | ms per step |\n|---|---|---|---|")
    parts = generate(options.model, options.tokens, with_sinks)
    for part in parts:
        print(f"| {part.tokens} | {part.blocks} | {part.resident_mib:.1f} | {part.step_ms:.3f} |", flush=True)


def perplexity(
    model: str, text: str, tokens: int, window: int, kind: dict[str, Any]
) -> tuple[float, float]:
    """Of the text's first tokens; and of those behind the first `window` only."""
    llm = LLM(model, **kind)
    prompt = llm.tokenizer.encode(text)[:tokens]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = llm.generate([prompt], params, progress=False)[0].prompt_logprobs or []
    logprobs = [entry.logprob for entry in scored]
    return _perplexity(logprobs), _perplexity(logprobs[window:])


def _perplexity(logprobs: list[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


@dataclass(frozen=True)
class Part:
    """After so many tokens; step_ms: mean of the last EVERY."""

    tokens: int
    blocks: int
    resident_mib: float
    step_ms: float


def generate(model: str, tokens: int, kind: dict[str, Any]) -> list[Part]:
    llm = LLM(model, **kind)
    engine, process = llm.engine, psutil.Process()
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=0, max_tokens=tokens, ignore_eos=True)
    prompt = pack_tokens(llm.tokenizer.encode("Once upon a time"))
    engine.submit(Submit(request_id="endless", incarnation="", epoch=0, prompt=prompt, params=params))
    parts = []
    began = time.perf_counter()
    while engine.has_work():
        engine.step()
        stats = engine.stats()
        if stats.generated_tokens % EVERY == 0 and stats.generated_tokens // EVERY > len(parts):
            now = time.perf_counter()
            blocks = stats.total_blocks - stats.free_blocks - stats.cached_blocks
            resident = process.memory_info().rss / (1 << 20)
            parts.append(Part(stats.generated_tokens, blocks, resident, (now - began) / EVERY * 1000))
            began = now
    return parts


if __name__ == "__main__":
    main()

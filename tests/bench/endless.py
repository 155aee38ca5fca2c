"""Generation without end: memory, step time and perplexity with attention sinks and a window.

    python tests/bench/endless.py [--model smollm2-135m] [--sinks 4] [--window 1020] [--tokens 20000]

First a long text within the trained length is scored with full context, with sinks and window, and with the
window alone. Then one sequence is generated, and after each thousand tokens the blocks in use and the
resident memory are told. Its last thousand steps alternate with the first thousand of a second sequence whose
window has just filled, ten by ten, so that what else the machine does slows both alike; medians count. The
text is this project's own documentation unless files are given. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.llm import LLM, SamplingParams
from decodefleet.worker.protocol import Submit

ROOT = Path(__file__).parents[2]
TEXT = sorted((ROOT / "deploy" / "docs" / "decisions").glob("*.md"))
EVERY, TURN, BLOCKS = 1000, 10, 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--window", type=int, default=1020)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--text", type=Path, nargs="*", default=TEXT)
    parser.add_argument("--text-tokens", type=int, default=4000, help="0 skips the text")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quantization", default="none", help="of the weights")
    options = parser.parse_args()
    common = {"threads": options.threads, "quantization": options.quantization}
    with_sinks = {"window": options.window, "attention_sinks": options.sinks, **common}
    if options.text_tokens:
        kinds = {
            "full context": common,
            f"{options.sinks} sinks and a window of {options.window}": with_sinks,
            f"a window of {options.window + options.sinks} alone": {
                "window": options.window + options.sinks,
                **common,
            },
        }
        text = "\n\n".join(path.read_text() for path in options.text)
        print("| attention | perplexity | behind the window |\n|---|---|---|")
        for name, kind in kinds.items():
            whole, behind = perplexity(options.model, text, options.text_tokens, options.window, kind)
            print(f"| {name} | {whole:.3f} | {behind:.3f} |", flush=True)
    generate(options.model, options.tokens, with_sinks)


def perplexity(model: str, text: str, tokens: int, window: int, kind: dict[str, Any]) -> tuple[float, float]:
    """Of the text's first tokens; and of those behind the first `window` only."""
    llm = LLM(model, **kind)
    prompt = llm.tokenizer.encode(text)[:tokens]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = llm.generate([prompt], params, progress=False)[0].prompt_logprobs or []
    logprobs = [entry.logprob for entry in scored]
    return _perplexity(logprobs), _perplexity(logprobs[window:])


def _perplexity(logprobs: list[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def generate(model: str, tokens: int, kind: dict[str, Any]) -> None:
    old = Generation(model, tokens, kind)
    process = psutil.Process()
    print("\n| tokens | blocks in use | resident MiB |\n|---|---|---|")
    for reached in range(EVERY, tokens + 1 - EVERY, EVERY):
        old.run_to(reached)
        resident = process.memory_info().rss / (1 << 20)
        print(f"| {reached} | {old.blocks} | {resident:.1f} |", flush=True)
    young = Generation(model, tokens, kind)
    filled = kind["window"] + kind["attention_sinks"]
    young.run_to(filled)
    times: dict[str, list[float]] = {"young": [], "old": []}
    for done in range(TURN, EVERY + 1, TURN):
        times["young"] += young.run_to(filled + done)
        times["old"] += old.run_to(tokens - EVERY + done)
    first, last = (statistics.median(each) * 1000 for each in times.values())
    print(
        f"\nA step takes {first:.2f} ms in the first {EVERY} after the window filled and {last:.2f} ms in "
        f"the last {EVERY} of {tokens}: {last / first:.3f} times as long."
    )


class Generation:
    """One sequence in an engine of its own."""

    def __init__(self, model: str, tokens: int, kind: dict[str, Any]) -> None:
        # few blocks, which are soon touched all: resident memory then tells what grows with the text
        llm = LLM(model, **kind, num_gpu_blocks_override=BLOCKS)
        params = SamplingParams(temperature=1.0, top_p=0.95, seed=0, max_tokens=tokens + 1, ignore_eos=True)
        prompt = pack_tokens(llm.tokenizer.encode("Once upon a time"))
        self._engine = llm.engine
        self._engine.submit(Submit(request_id="r", incarnation="", epoch=0, prompt=prompt, params=params))

    @property
    def blocks(self) -> int:
        stats = self._engine.stats()
        return stats.total_blocks - stats.free_blocks - stats.cached_blocks

    def run_to(self, tokens: int) -> list[float]:
        """Seconds of each step until so many tokens are generated."""
        times = []
        while self._engine.stats().generated_tokens < tokens:
            began = time.perf_counter()
            self._engine.step()
            times.append(time.perf_counter() - began)
        return times


if __name__ == "__main__":
    main()

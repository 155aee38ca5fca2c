"""Where a decode step on a CPU spends its time: kernels, the head, sampling, Python, HTTP.

    python tests/bench/step_breakdown.py [--streams 1 8] [--context 190] [--served 1:12.3 8:21.0]

Kernels are timed one by one in the recording of a step, in its order: caches are as in a step; the best
of many passes counts. What a step takes beyond them is Python's. served: ms per output token that a server's
clients saw at that many streams; what it has beyond the step is HTTP's and other processes'. Needs a compiler
for C++. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch

from decodefleet.kernels import ops
from decodefleet.kernels.cpu.recording import Program
from decodefleet.worker.llm import LLM, SamplingParams

PASSES = 40
LABELS = {
    "df_linear": "linears",
    "df_paged_attention": "attention",
    "df_add_rms_norm": "norms",
    "df_norm_add": "norms",
    "df_norm_heads": "norms",
    "df_rotary_store": "rotary + KV write",
    "df_silu_mul": "gate",
    "df_gelu_tanh_mul": "gate",
    "df_embed": "embedding",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=190, help="tokens in the cache of each stream")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--served", nargs="*", default=[], metavar="STREAMS:MS")
    options = parser.parse_args()
    served = {int(pair.split(":")[0]): float(pair.split(":")[1]) for pair in options.served}
    llm = LLM(options.model, quantization=options.quantization)
    columns = {n: breakdown(llm, n, options.context, served.get(n)) for n in options.streams}
    labels = list(dict.fromkeys(label for column in columns.values() for label in column))
    print("| ms per step | " + " | ".join(f"{n} streams" for n in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for label in labels:
        cells = (f"{column[label]:.2f}" if label in column else "" for column in columns.values())
        print(f"| {label} | " + " | ".join(cells) + " |")


def breakdown(llm: LLM, streams: int, context: int, served: float | None) -> dict[str, float]:
    """Milliseconds by what they go to."""
    step, parts = _run(llm, streams, context)
    rank = llm.engine._runner.rank
    hidden = torch.randn(streams, rank._hidden_size).to(rank.dtype)
    with torch.inference_mode():
        logits = rank.model.logits(hidden)
        parts["head"] = _best_ms(lambda: rank.model.logits(hidden))
        parts["sampling (greedy)"] = _best_ms(lambda: ops.argmax(logits))
    parts["Python"] = step - sum(parts.values())
    parts["= a step of the engine"] = step
    if served is not None:
        parts["HTTP and other processes"] = served - step
        parts["= a token, as clients see it"] = served
    return parts


def _run(llm: LLM, streams: int, context: int) -> tuple[float, dict[str, float]]:
    """Median of the steps in which all streams decode, and the kernels of one of them."""
    tokens = random.Random(0)
    prompts = [[tokens.randrange(1000, 40_000) for _ in range(context - 48)] for _ in range(streams)]
    steps: list[float] = []
    kernels: dict[str, float] = {}
    engine = llm.engine
    plain = engine.step

    def timed() -> object:
        began = time.perf_counter()
        deltas = plain()
        if len(deltas) == streams:
            steps.append(1000 * (time.perf_counter() - began))
            # here, while the step's inputs are where its recording looks for them
            if len(steps) == 48:
                kernels.update(_kernels_ms(_program(llm, streams)))
        return deltas

    engine.step = timed  # type: ignore[method-assign,assignment]
    try:
        llm.generate(prompts, SamplingParams(max_tokens=128, temperature=0, ignore_eos=True), progress=False)
    finally:
        engine.step = plain  # type: ignore[method-assign]
    return statistics.median(steps), kernels


def _program(llm: LLM, streams: int) -> Program:
    graphs = llm.engine._runner.rank._graphs
    assert graphs is not None, "steps are not recorded here"
    program = next(own.replay for own in graphs._recordings.values() if own.output.shape[0] == streams)
    assert isinstance(program, Program), "this model's step is not all native"
    return program


def _kernels_ms(program: Program) -> dict[str, float]:
    best: dict[str, float] = {}
    for _ in range(PASSES):
        spent: Counter[str] = Counter()
        for i, name in enumerate(program.names):
            began = time.perf_counter()
            program.run_one(i)
            spent[LABELS.get(name, name)] += 1000 * (time.perf_counter() - began)
        best = {label: min(ms, best.get(label, ms)) for label, ms in spent.items()}
    return dict(sorted(best.items(), key=lambda item: -item[1]))


def _best_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(PASSES):
        began = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - began))
    return min(times)


if __name__ == "__main__":
    main()

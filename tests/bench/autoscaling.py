"""Autoscaling on a trace, in simulation: share of requests within the objectives against GPU-seconds.

    python tests/bench/autoscaling.py AzureLLMInferenceTrace_conv.csv --out results/NAME

Traces are Azure's CSV (2023; CC-BY-4.0, not part of this repository), replayed once, on workers slow
enough for several to be needed; `--copies` that come `--apart` seconds after each other make bursts
higher. Every worker takes `--startup` seconds to serve and costs from the moment it is ordered. Beside
our autoscaler: Serve's default policy with its default target and with one that suits the model, KEDA's
rule on waiting requests, and a planner that knows the future. Writes NAME.md, NAME.json and NAME.svg.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from decodefleet.cluster.autoscaling.config import ScalingConfig
from decodefleet.cluster.autoscaling.replay import WorkerModel
from decodefleet.cluster.bench.machine import provenance
from decodefleet.cluster.bench.traces import read_trace
from decodefleet.cluster.simulate.arrivals import Arrival
from decodefleet.cluster.simulate.chart import Panel, Series, chart
from decodefleet.cluster.simulate.compare import summarize
from decodefleet.cluster.simulate.fleet import Blueprint
from decodefleet.cluster.simulate.machine import derive, gpu, model_shape
from decodefleet.cluster.simulate.outcome import Objectives, Summary
from decodefleet.cluster.simulate.policies import find_policy
from decodefleet.cluster.simulate.scaling import (
    Ours,
    Planner,
    Point,
    ScaledFleet,
    Scaler,
    ServeDefault,
    WaitingRule,
)
from decodefleet.cluster.simulate.simulation import Simulation
from decodefleet.worker.config import BatchConfig

BLOCK = 64
STEP_TARGET_S = 0.075


def load(trace: Path, copies: int, limit: int | None, apart_s: float) -> list[Arrival]:
    found = [
        Arrival((one.at or 0.0) + apart_s * copy, one.input_len, one.output_len, b"")
        for copy in range(copies)
        for one in read_trace(trace, limit=limit)
    ]
    return sorted(found)


def changes_of_direction(timeline: list[Point]) -> float:
    """Per 10 minutes."""
    moves = [b.target - a.target for a, b in pairwise(timeline) if a.target != b.target]
    turns = sum((a > 0) != (b > 0) for a, b in pairwise(moves))
    return turns / max(1.0, timeline[-1].at / 600)


def run(
    name: str,
    arrivals: list[Arrival],
    blueprint: Blueprint,
    make: Callable[[Simulation], Scaler],
    first: int,
    startup_s: float,
    wanted: Objectives,
    gpus: int,
) -> tuple[Summary, list[Point]]:
    print(name, file=sys.stderr, flush=True)
    simulation = Simulation(arrivals, blueprint, find_policy("cost"), max_queue=10**9)
    fleet = ScaledFleet(simulation, make(simulation), first=first, startup_s=startup_s)
    simulation.run()
    return summarize(simulation, wanted, gpus), fleet.timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--apart", type=float, default=3.0)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--gpu", default="a100")
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--tensor-parallel-size", type=int, default=4)
    parser.add_argument("--startup", type=float, default=60.0)
    parser.add_argument("--ttft", type=float, default=3.0)
    parser.add_argument("--itl", type=float, default=0.1)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    arrivals = load(options.trace, options.copies, options.requests, options.apart)
    machine = derive(gpu(options.gpu), model_shape(options.model), options.tensor_parallel_size)
    batch = BatchConfig(max_num_seqs=256, max_num_batched_tokens=2048, itl_target_ms=1000 * STEP_TARGET_S)
    blueprint = Blueprint(machine, batch, BLOCK)
    config = ScalingConfig(
        min_workers=1,
        max_workers=64,
        ttft_target_s=options.ttft,
        itl_target_s=options.itl,
        startup_s=options.startup,
    )
    model = WorkerModel(machine.step.linear, machine.kv_tokens, STEP_TARGET_S, 256)
    exact = config.model_copy(update={"attainment": 0.99})
    planner = Planner(arrivals, model, exact, options.startup)
    scalers: dict[str, Callable[[Simulation], Scaler]] = {
        "planner": lambda simulation: planner,
        "ours": lambda simulation: Ours(simulation, config),
        "ours, headroom 10 %": lambda simulation: Ours(
            simulation, config.model_copy(update={"headroom": 0.1})
        ),
        "Serve, 2 ongoing": lambda simulation: ServeDefault(config),
        "Serve, 32 ongoing": lambda simulation: ServeDefault(config, 32.0),
        "waiting > 5": lambda simulation: WaitingRule(config),
    }
    wanted = Objectives(options.ttft, options.itl)
    found = {
        name: run(
            name,
            arrivals,
            blueprint,
            make,
            max(planner.needs[:4]),
            options.startup,
            wanted,
            options.tensor_parallel_size,
        )
        for name, make in scalers.items()
        if not options.only or name in options.only
    }
    base = found["planner"][0].gpu_s if "planner" in found else None
    lines = ["| | good | GPU-hours | against planner | TTFT p99 ms | TPOT p99 ms | turns in 10 min | most |"]
    lines.append("|---" * 8 + "|")
    for name, (summary, timeline) in found.items():
        against = "–" if base is None else f"{summary.gpu_s / base:.2f}"
        lines.append(
            f"| {name} | {summary.attained:.2%} | {summary.gpu_s / 3600:.1f} | {against} |"
            f" {summary.ttft.p99:.0f} | {summary.tpot.p99:.0f} | {changes_of_direction(timeline):.1f} |"
            f" {max(point.target for point in timeline)} |"
        )
    table = "\n".join(lines) + "\n"
    print(table)
    if options.out is not None:
        about = provenance()
        text = f"{about['date']}, commit {about['commit']}, `{about['command']}`\n\n{table}"
        options.out.with_suffix(".md").write_text(text, encoding="utf-8")
        document = {**about, "runs": {name: one.as_json() for name, (one, _) in found.items()}}
        options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".svg").write_text(picture(arrivals, found), encoding="utf-8")


def picture(arrivals: list[Arrival], found: dict[str, tuple[Summary, list[Point]]]) -> str:
    minutes = int(arrivals[-1].at // 60) + 1
    work = [0.0] * minutes
    for one in arrivals:
        work[int(one.at // 60)] += (one.prompt_tokens + one.output_tokens) / 60
    workers = [
        Series(name, [point.at / 60 for point in line], [float(point.target) for point in line], "steps")
        for name, (_, line) in found.items()
    ]
    load = [Series("prompt and answer", [float(minute) for minute in range(minutes)], work, "steps")]
    points = [
        Series(name, [one.gpu_s / 3600], [100 * one.attained], "points") for name, (one, _) in found.items()
    ]
    return chart(
        [
            Panel("load, tokens/s", "minutes", load),
            Panel("workers asked for", "minutes", workers),
            Panel("% of requests within both objectives", "GPU-hours", points),
        ]
    )


if __name__ == "__main__":
    main()

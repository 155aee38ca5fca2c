"""Autoscaling on traces, in simulation: share of requests within the objectives against GPU-seconds.

    python tests/bench/autoscaling.py AzureLLMInferenceTrace_conv.csv --out results/NAME

Traces are Azure's CSV (2023; CC-BY-4.0) or Mooncake's JSON lines (Apache-2.0), not part of this repository,
replayed once without what prompts have in common, on workers slow enough for several to be needed;
`--copies` that come `--apart` seconds after each other make larger loads, `--skip` leaves out so many
requests at the start and `--reversed` turns time round. Every worker takes `--startup` seconds to serve and
costs from the moment it is ordered. Beside our autoscaler: Serve's default policy with its default target and
with one that suits the model, KEDA's rule on waiting requests, and a planner that knows the future. Writes
NAME.md, NAME.json and NAME.svg.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from decodefleet.cluster.autoscaling.config import ScalingConfig
from decodefleet.cluster.bench.machine import provenance
from decodefleet.cluster.bench.traces import read_trace
from decodefleet.cluster.simulate.arrivals import Arrival
from decodefleet.cluster.simulate.fleet import Blueprint
from decodefleet.cluster.simulate.machine import derive, gpu, model_shape
from decodefleet.cluster.simulate.policies import find_policy
from decodefleet.cluster.simulate.scaled import Setup, run_scaled
from decodefleet.cluster.simulate.scaled_report import document, markdown, plot
from decodefleet.cluster.simulate.scaling import Scaler, ServeDefault, WaitingRule
from decodefleet.cluster.simulate.simulation import Simulation
from decodefleet.worker.config import BatchConfig

BLOCK = 64
STEP_TARGET_MS = 75.0


def load(options: argparse.Namespace) -> list[Arrival]:
    requests = read_trace(options.trace, limit=options.requests)[options.skip :]
    start, end = requests[0].at or 0.0, requests[-1].at or 0.0
    found = []
    for one in requests:
        at = end - (one.at or 0.0) if options.reversed else (one.at or 0.0) - start
        for copy in range(options.copies):
            found.append(Arrival(at + options.apart * copy, one.input_len, one.output_len, b""))
    return sorted(found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--apart", type=float, default=3.0)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--reversed", action="store_true")
    parser.add_argument("--gpu", default="a100")
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--tensor-parallel-size", type=int, default=4)
    parser.add_argument("--startup", type=float, default=60.0)
    parser.add_argument("--ttft", type=float, default=3.0)
    parser.add_argument("--itl", type=float, default=0.1)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def set_up(options: argparse.Namespace) -> Setup:
    machine = derive(gpu(options.gpu), model_shape(options.model), options.tensor_parallel_size)
    batch = BatchConfig(max_num_seqs=256, max_num_batched_tokens=2048, itl_target_ms=STEP_TARGET_MS)
    config = ScalingConfig(
        min_workers=1,
        max_workers=64,
        ttft_target_s=options.ttft,
        itl_target_s=options.itl,
        startup_s=options.startup,
    )
    return Setup(
        load(options),
        Blueprint(machine, batch, BLOCK),
        find_policy("cost"),
        config,
        options.tensor_parallel_size,
    )


def main() -> None:
    options = parse()
    setup = set_up(options)
    planner = setup.planner()
    scalers: dict[str, Callable[[Simulation], Scaler]] = {
        "planner": lambda _: planner,
        "ours": setup.ours,
        "Serve, 2 ongoing": lambda _: ServeDefault(setup.config),
        "Serve, 32 ongoing": lambda _: ServeDefault(setup.config, 32.0),
        "waiting > 5": lambda _: WaitingRule(setup.config),
    }
    runs = []
    for name, make in scalers.items():
        if not options.only or name in options.only:
            print(name, file=sys.stderr, flush=True)
            runs.append(run_scaled(setup, name, make, planner.first))
    table = markdown(runs)
    print(table)
    if options.out is not None:
        about = provenance()
        text = f"{about['date']}, commit {about['commit']}, `{about['command']}`\n\n{table}"
        options.out.with_suffix(".md").write_text(text, encoding="utf-8")
        written = json.dumps(document(about, {"trace": options.trace.name}, runs), indent=1)
        options.out.with_suffix(".json").write_text(written + "\n", encoding="utf-8")
        options.out.with_suffix(".svg").write_text(plot(setup.arrivals, runs), encoding="utf-8")


if __name__ == "__main__":
    main()

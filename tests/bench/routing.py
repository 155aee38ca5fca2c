"""Placement policies on traces, in simulation: hit rates against the oracle, TTFT, balance, and the frontier.

    python tests/bench/routing.py conversation_trace.jsonl synthetic_trace.jsonl --out results/NAME

Traces are Mooncake's JSON lines (FAST'25; not part of this repository). Ours was designed on the first half
of them; the second half is reported. Each load is a multiple of the trace's own pace for 16 workers; 64
workers get four populations of users with nothing in common. Every policy runs through the same scheduler
core; the frontier weighs load more or less than the cost policy does. Writes NAME.md, NAME.json and a
NAME-TRACE.svg per trace. Results depend on the arguments alone, not on the machine or what else runs on it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from decodefleet.cluster.bench.machine import provenance
from decodefleet.cluster.simulate.chart import Panel, Series, chart
from decodefleet.cluster.simulate.compare import Comparison, compare
from decodefleet.cluster.simulate.options import SimulateOptions
from decodefleet.cluster.simulate.report import markdown

POLICIES = ("cost", "round-robin", "least-load", "prefix-only", "sglang", "dynamo", "llm-d")
WEIGHTS = (0.2, 0.5, 2.0, 5.0)
# as many populations of users as this goes into the workers: the same load on each, the same time between two
# requests of a conversation
PER_WORKERS = 16


def run(trace: Path, workers: int, speed: float, part: Sequence[float], block_size: int) -> Comparison:
    total = sum(1 for _ in trace.open())
    options = SimulateOptions(
        trace=trace,
        skip=int(part[0] * total),
        requests=int((part[1] - part[0]) * total),
        trace_speed=speed,
        copies=max(1, workers // PER_WORKERS),
        workers=workers,
        policy=(*POLICIES, *(f"cost:{weight:g}" for weight in WEIGHTS)),
        block_size=block_size,
        # all are to be served by all
        max_queue=10**9,
    )

    def observe(name: str, requests: int):
        print(f"{trace.stem} {workers} workers ×{speed:g}: {name}", file=sys.stderr, flush=True)
        return lambda ended: None

    return compare(options, observe)


def panel(title: str, found: Comparison) -> Panel:
    """Hit rate against p90 TTFT; the frontier is a line through the cost policy."""
    ours = sorted(
        (run.hit_rate, run.ttft.p90) for run in found.runs if run.ttft and run.policy.startswith("cost")
    )
    series = [Series("cost, load weighed", [100 * hit for hit, _ in ours], [ms / 1000 for _, ms in ours])]
    series += [
        Series(run.policy, [100 * run.hit_rate], [run.ttft.p90 / 1000], "points")
        for run in found.runs
        if run.ttft and ":" not in run.policy
    ]
    return Panel(
        f"{title}: p90 TTFT, s (oracle {found.oracle:.1%})", "% of prompt tokens found", series, log=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--speeds", type=float, nargs="+", default=[5.0])
    parser.add_argument("--part", type=float, nargs=2, default=[0.5, 1.0], help="shares of the trace")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    about = provenance()
    lines = [f"{about['date']}, commit {about['commit']}, `{about['command']}`", ""]
    documents = []
    for trace in options.traces:
        panels = []
        name = trace.stem.removesuffix("_trace")
        for workers in options.workers:
            for speed in options.speeds:
                found = run(trace, workers, speed, options.part, options.block_size)
                title = f"{name}, {workers} workers, ×{speed:g}"
                lines += [f"## {title}", "", f"oracle {found.oracle:.2%}, endless {found.endless:.2%}", ""]
                lines += [markdown(found)]
                panels.append(panel(title, found))
                documents.append({"title": title, "oracle": found.oracle, "endless": found.endless})
                documents[-1]["runs"] = [one.as_json() for one in found.runs]
                options.out.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
        options.out.with_name(f"{options.out.name}-{name}.svg").write_text(chart(panels), encoding="utf-8")
    whole = json.dumps({**about, "runs": documents}, indent=1)
    options.out.with_suffix(".json").write_text(whole + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

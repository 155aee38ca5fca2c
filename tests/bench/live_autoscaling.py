"""A live fleet under a load that comes and goes: requests, workers and time to first token, drawn.

    PYTHONPATH=tests/support python tests/bench/live_autoscaling.py --out tests/bench/results/NAME

Takes about five minutes. Workers are pretended engines that Ray Serve really starts and stops. Writes NAME.md
and NAME.svg; exits with 1 where a request was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import tempfile
from pathlib import Path

from live_scaling import OPTIONS, Seen, follow_load, lost, scaled_fleet
from quantiles import quantile

from decodefleet.cluster.bench.machine import provenance
from decodefleet.cluster.simulate.chart import Panel, Series, chart

BIN_S = 5.0


def picture(seen: Seen) -> str:
    bins = [BIN_S * number for number in range(int(seen.now / BIN_S) + 1)]
    rates = [sum(at <= due < at + BIN_S for due, _ in seen.replies) / BIN_S for at in bins]
    times, counts = zip(*seen.workers, strict=True)
    due, first = zip(*((due, 1000 * reply.first_s) for due, reply in seen.replies), strict=True)
    return chart(
        [
            Panel("requests/s", "seconds", [Series("offered", bins, rates, "steps")]),
            Panel("workers", "seconds", [Series("running", times, [float(one) for one in counts], "steps")]),
            Panel(
                "time to first token, ms", "seconds", [Series("a request", due, first, "points")], log=True
            ),
        ]
    )


def table(seen: Seen) -> str:
    lines = ["| load | requests | lost | TTFT p50 ms | p95 | longest |", "|---" * 6 + "|"]
    for name, replies in seen.parts.items():
        first = sorted(1000 * reply.first_s for _, reply in replies)
        quantiles = f"{quantile(first, 0.5):.0f} | {quantile(first, 0.95):.0f} | {first[-1]:.0f}"
        lines.append(f"| {name} | {len(replies)} | {lost(replies)} | {quantiles} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, scaled_fleet(Path(folder) / "log") as served:
        seen = asyncio.run(follow_load(served))
    print(table(seen))
    if options.out is not None:
        about = provenance()
        machine = f"{about['machine']['cpu']}, {about['machine']['cores']} cores"
        head = f"{about['date']}, commit {about['commit']}, {machine}, `{about['command']}`"
        text = f"{head}\n\nOptions of `serve`: `{shlex.join(OPTIONS)}`\n\n{table(seen)}\n"
        options.out.with_suffix(".md").write_text(text, encoding="utf-8")
        options.out.with_suffix(".svg").write_text(picture(seen), encoding="utf-8")
    raise SystemExit(lost(seen.replies) > 0)


if __name__ == "__main__":
    main()

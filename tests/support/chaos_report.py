"""What a run of the chaos suite was asked for, and what came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from chaos_cluster import Outcome
from quantiles import quantile

SEED = int(os.environ.get("CHAOS_SEED") or time.time())
REPEAT = int(os.environ.get("CHAOS_REPEAT") or 1)
SCENARIO = os.environ.get("CHAOS_SCENARIO")
# fake engines; or "ranks", a tiny model on two ranks a worker; or "real", SmolLM2 in bf16
MODEL = os.environ.get("CHAOS_MODEL") or "fake"
RANKS = 2 if MODEL == "ranks" else 1

outcomes: list[Outcome] = []


def table() -> Iterator[str]:
    """A line per scenario; pauses are those of the streams that were held up."""
    row = "{:<55} {:>5} {:>6} {:>6} {:>7} {:>6} {:>8} {:>7} {:>7} {:>9}"
    yield row.format(
        "scenario", "runs", "faults", "equal", "broken", "moved", "held up", "p50 s", "p99 s", "settled s"
    )
    for name in dict.fromkeys(outcome.scenario for outcome in outcomes):
        runs = [outcome for outcome in outcomes if outcome.scenario == name]
        pauses = [pause for run in runs for pause in run.silences]
        yield row.format(
            name,
            len(runs),
            sum(len(run.faults) for run in runs),
            sum(run.equal for run in runs),
            sum(run.broken for run in runs),
            sum(run.moved for run in runs),
            len(pauses),
            f"{quantile(pauses, 0.5):.2f}",
            f"{quantile(pauses, 0.99):.2f}",
            f"{max(run.settled_s for run in runs):.1f}",
        )

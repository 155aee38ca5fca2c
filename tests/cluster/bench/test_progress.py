from __future__ import annotations

import io

from rich.console import Console

from decodefleet.cluster.bench.http import Exchange
from decodefleet.cluster.bench.plan import Plan
from decodefleet.cluster.bench.progress import Bars, Lines, progress
from decodefleet.cluster.bench.workload import Synthetic


def plan(count: int) -> Plan:
    return Plan("rate 2/s", Synthetic(8, 8).requests("r", count))


def test_a_log_gets_lines_and_a_terminal_bars() -> None:
    assert isinstance(progress(Console(file=io.StringIO())), Lines)
    assert isinstance(progress(Console(file=io.StringIO(), force_terminal=True)), Bars)


def test_before_the_first_run_a_terminal_shows_the_warm_up() -> None:
    printed = io.StringIO()
    with Bars(Console(file=printed, force_terminal=True)) as bars:
        assert [task.description for task in bars._progress.tasks] == ["warming up"]
        bars(plan(6), None)
        assert [task.description for task in bars._progress.tasks] == ["rate 2/s"]
        bars(plan(6), Exchange(status=200))
        assert bars._progress.tasks[0].completed == 1


def test_lines_come_at_both_ends_and_now_and_then_between() -> None:
    now, printed = [100.0], io.StringIO()
    with Lines(Console(file=printed), lambda: now[0]) as lines:
        run = plan(6)
        lines(run, None)
        good, refused, broken = Exchange(status=200), Exchange(status=500), Exchange(failure="timeout")
        for at, exchange in enumerate([good, refused, broken, good, good, good]):
            now[0] = 102.0 + 2.0 * at
            lines(run, exchange)
    assert printed.getvalue().splitlines() == [
        "rate 2/s: 0 of 6 requests, 0 s",
        "rate 2/s: 3 of 6 requests, 2 failed, 6 s",
        "rate 2/s: 6 of 6 requests, 2 failed, 12 s",
    ]

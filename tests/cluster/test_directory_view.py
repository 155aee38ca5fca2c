"""What the terminal shows of who holds which blocks."""

from __future__ import annotations

from rich.console import Console

from decodefleet.cluster.directory.holdings import Holding, Holdings
from decodefleet.cluster.directory_view import HeldNow


def shown(*holders: Holding, source: str) -> str:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(*HeldNow(Holdings(source=source, holders=[*holders])).tables(), sep="\n")
    return captured.get()


def holding(number: int, **stored: float) -> Holding:
    return Holding(
        model="m",
        worker_id=f"worker-1hwfoot{number}",
        incarnation="554d3ff61089b269",
        blocks={"gpu": 51, "cpu": 0, "nvme": 0},
        **stored,
    )


def test_what_a_scheduler_cannot_know_takes_no_columns() -> None:
    text = shown(holding(0), holding(1), source="scheduler")
    assert "worker-1hwfoot0" in text
    assert "554d3ff61089b269" in text
    assert "lease" not in text
    assert "2 workers" in text


def test_names_are_never_cut() -> None:
    text = shown(holding(0, redis_bytes=2048, lease_s=3.0, changed_s=1.0), source="Redis")
    for told in ("lease", "3.0 s", "2 KiB", "1 worker;"):
        assert told in text
    assert "…" not in text

"""What the terminal shows of an overview that the scheduler's own code makes."""

from __future__ import annotations

import pytest
from rich.console import Console, RenderableType

from decodefleet.cluster.fleet_top import Rates, _fitting
from decodefleet.cluster.fleet_view import BLOCKS, fleet_view, seconds, spark
from decodefleet.cluster.observability.router_metrics import TTFT_BOUNDS_S
from decodefleet.cluster.scheduling.config import SchedulingConfig
from decodefleet.cluster.scheduling.history import History, Now
from decodefleet.cluster.scheduling.overview import overview
from decodefleet.cluster.scheduling.scheduler import GlobalScheduler
from decodefleet.worker.protocol import ModelCard, Place, Register, RouterCounts, TierStats, WorkerStats

TTFT_BUCKETS = len(TTFT_BOUNDS_S) + 1
CARD = ModelCard(
    name="m",
    folder="",
    max_model_len=4096,
    vocab_size=50,
    block_size=16,
    hash_root=b"r" * 16,
    kv_bytes_per_token=1,
)


def make_overview(workers: int = 2) -> dict:
    core, history = GlobalScheduler(1), History()
    stats = WorkerStats(
        total_blocks=1000,
        free_blocks=300,
        cached_blocks=500,
        running=3,
        max_running=8,
        prefix_query_tokens=100,
        prefix_hit_tokens=25,
        generated_tokens=500,
        tiers={"cpu": TierStats(total_blocks=10, used_blocks=5), "nvme": TierStats()},
    )
    for number in range(workers):
        name = f"worker-1hwfoot{number}"
        core.register(Register(worker_id=name, incarnation="i", endpoint="e", card=CARD, stats=stats), 0.0)
    core.hello("router", 0.0)
    for name, model in (("cmpl-a", "m"), ("cmpl-b", "nobody's")):
        core.place(Place(request_id=name, model=model, prompt_tokens=64, max_new_tokens=8), "router", 0.5)
    counts = RouterCounts(ttft=(0,) * TTFT_BUCKETS, itl=(0,) * 13)
    history.note(0.0, 0.0, Now({}, {"router": counts}, 0))
    later = RouterCounts(ttft=(0, 4, *(0,) * (TTFT_BUCKETS - 2)), itl=(0, 9, *(0,) * 11))
    history.note(5.0, 5.0, Now({}, {"router": later}, 0))
    return overview(core, history, 1.0, 1000.0, 0.0)


def shown(width: int, seen: dict) -> str:
    return printed(fleet_view(seen, {"worker-1hwfoot0": 123.4}, width), Console(width=width))


def printed(view: RenderableType, console: Console) -> str:
    with console.capture() as captured:
        console.print(view)
    return captured.get()


@pytest.mark.parametrize("width", [80, 160])
def test_workers_numbers_and_reasons_are_shown(width: int) -> None:
    text = shown(width, make_overview())
    for told in ("worker-1hwfoot1", "serving", "waiting", "tokens/s", "hits"):
        assert told in text
    for told in ("2 of 2 workers serve", "3/8", "20%", "50%", "25%", "123", "refused: unknown_model"):
        assert told in text
    assert "compute" in text
    assert ("cpu 50%, nvme off" in text) == (width == 160)
    assert ("cmpl-a" in text) == (width == 160)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text.split("why")[0]


def test_an_empty_fleet_can_be_shown() -> None:
    seen = overview(GlobalScheduler(1), History(), 1.0, 1000.0, 0.0)
    text = shown(80, seen)
    assert "no model yet" in text
    assert "0 of 0 workers serve" in text
    assert "asleep" not in text


def test_a_fleet_that_sleeps_is_not_one_that_is_down() -> None:
    core = GlobalScheduler(1, SchedulingConfig(sleeps=True))
    assert "asleep" not in shown(80, overview(core, History(), 1.0, 1000.0, 0.0))
    stats = WorkerStats()
    core.register(Register(worker_id="w", incarnation="i", endpoint="e", card=CARD, stats=stats), 2.0)
    assert "asleep" not in shown(80, overview(core, History(), 3.0, 1000.0, 0.0))
    core.tick(60.0)
    assert "asleep: a request wakes it" in shown(80, overview(core, History(), 61.0, 1000.0, 0.0))


def test_who_went_is_told_by_name() -> None:
    seen = make_overview()
    seen["changes"] = [
        {"at": -5000.0, "worker_id": "worker-old", "what": "lost"},
        {"at": 930.0, "worker_id": "worker-a", "what": "came"},
        {"at": 988.0, "worker_id": "worker-b", "what": "lost"},
    ]
    text = shown(80, seen)
    assert "worker-b lost 12 s ago  worker-a came 70 s ago" in text
    assert "worker-old" not in text


def test_narrow_windows_cut_reasons_and_no_numbers() -> None:
    seen = make_overview()
    point = seen["history"]["points"][-1]
    seen["history"]["points"] = [point] * 40
    placed = seen["placements"][1]
    cost = dict.fromkeys(("start", "restore", "compute", "slowdown", "evict", "total"), 1.25)
    placed |= {"prompt_tokens": 12345, "hit_tokens": 678, "waited_s": 0.25}
    placed["considered"][0]["cost_s"] = cost
    for width, sparks in ((80, 14), (120, 30)):
        lines = shown(width, seen).splitlines()
        (numbers,) = (line for line in lines if "between tokens p50" in line)
        assert [len(part) for part in numbers.split() if set(part) <= set(BLOCKS)] == [sparks, sparks]
        (row,) = (line for line in lines if "12345" in line)
        assert "678" in row
        assert "250 ms" in row
        assert "1.25 s = start 1.25 s" in row


@pytest.mark.parametrize("height", [24, 50])
@pytest.mark.parametrize("workers", [0, 1, 3, 40])
def test_what_is_shown_fits_the_terminal(height: int, workers: int) -> None:
    seen = make_overview(workers)
    seen["placements"] = seen["placements"][:1] * 20
    seen["refused"] = dict.fromkeys(("unknown_model", "queue_full", "no_worker", "deadline"), 1000)
    seen["changes"] = [{"at": 988.0, "worker_id": "worker-b", "what": "lost"}]
    if workers == 40:
        seen["workers"][33]["state"] = "draining"
    console = Console(width=80, height=height)
    text = printed(_fitting(seen, {}, console), console)
    lines = text.splitlines()
    # one line is kept for an error
    assert len(lines) <= height - 1
    assert max(map(len, lines)) <= 80
    # one is in the head; without workers nothing has been decided yet
    assert sum("refused: unknown_model" in line for line in lines) >= (4 if workers else 1)
    if workers == 40:
        assert "draining" in text
        assert f"and {40 - text.count('serving') - 1} more" in text
    else:
        assert "more" not in text
        assert len(lines) == height - 1 or height == 50 or not workers


def test_sparks() -> None:
    assert spark([0.0, 1.0, 2.0, 4.0]) == BLOCKS[0] + BLOCKS[2] + BLOCKS[4] + BLOCKS[7]
    assert spark([None, 0.0]) == " " + BLOCKS[0]
    assert spark([]) == ""
    assert len(spark([1.0] * 100, width=10)) == 10


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (0.0021, "2.1 ms"), (0.25, "250 ms"), (1.5, "1.50 s"), (75.0, "75 s")],
)
def test_times(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_rates_are_of_one_life_of_a_worker() -> None:
    rates, seen = Rates(), make_overview(1)
    assert rates.of(seen) == {}
    worker = seen["workers"][0]
    later = {**seen, "at": seen["at"] + 2.0, "workers": [{**worker, "generated_tokens": 700}]}
    assert rates.of(later) == {"worker-1hwfoot0": 100.0}
    reborn = {**later, "at": seen["at"] + 4.0, "workers": [{**worker, "incarnation": "two"}]}
    assert rates.of(reborn) == {}

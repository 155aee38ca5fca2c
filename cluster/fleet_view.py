"""The fleet's overview as a terminal shows it, for `decodefleet top`. Reads plain data, asks nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK = 30
# names and numbers beside two sparks
BESIDE_SPARKS = 52
PLACEMENTS = 8
CHANGES = 3
CHANGED_S = 1800
WIDE = 120
# there is room for whole request ids
WIDEST = 180
PLACED_ON = 24
STATES = {"serving": "green", "draining": "yellow"}
TERMS = {
    "start": "start",
    "restore": "restore",
    "compute": "compute",
    "slowdown": "slow-down",
    "evict": "cache",
}


def fleet_view(
    seen: dict[str, Any],
    rates: dict[str, float],
    width: int,
    placements: int = PLACEMENTS,
    workers: int | None = None,
) -> RenderableType:
    """seen: of `/debug/fleet`, the whole recent past in it. rates: tokens per second by worker.

    width: of the terminal, in characters; a narrow one gets fewer columns rather than cut ones.
    placements, workers: most that are shown; of workers all are if not given.
    """
    return Group(
        _head(seen),
        _numbers(seen, min(SPARK, max(1, (width - BESIDE_SPARKS) // 2))),
        _workers(seen, rates, width >= WIDE, workers),
        *_changes(seen),
        _placements(seen, placements, width),
    )


def spark(values: Sequence[float | None], width: int = SPARK) -> str:
    """The last values as blocks, 0 to the highest of them; a gap is a blank."""
    shown = values[-width:]
    top = max((value for value in shown if value is not None), default=0.0)

    def block(value: float | None) -> str:
        if value is None:
            return " "
        return BLOCKS[min(len(BLOCKS) - 1, int(value / top * len(BLOCKS)))] if top > 0 else BLOCKS[0]

    return "".join(map(block, shown))


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 1e-6:
        return "0"
    if value < 1:
        return f"{value * 1e3:.1f} ms" if value < 0.01 else f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _head(seen: dict[str, Any]) -> Text:
    models = ", ".join(model["name"] for model in seen["models"]) or "no model yet"
    serving = sum(worker["state"] == "serving" for worker in seen["workers"])
    index, queue = seen["prefix_index"], seen["queue"]
    routers = "1 router" if seen["routers"] == 1 else f"{seen['routers']} routers"
    head = Text(models, style="bold")
    # one that never had a worker has not started yet
    if seen["models"] and not seen["workers"] and seen.get("sleeps"):
        head.append("  asleep: a request wakes it", "yellow")
    else:
        colour = "bold red" if not serving else "green" if serving == len(seen["workers"]) else "yellow"
        head.append(f"  {serving} of {len(seen['workers'])} workers serve", colour)
    head.append(f", {routers}, policy {seen['policy']}, {seen['placed']} placed", "dim")
    if queue["length"]:
        head.append(f", {queue['length']} queued for {seconds(queue['oldest_s'])}", "yellow")
    if not index["directory_up"]:
        head.append(", prefix directory away", "yellow")
    for reason, count in seen["refused"].items():
        head.append(f", {count} refused: {reason}", "red")
    return head


def _numbers(seen: dict[str, Any], width: int) -> Table:
    """width: of each spark."""
    points = seen["history"]["points"]
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))

    def add(name: str, key: str, form: Any, index: int | None = None) -> None:
        values = [_pick(point[key], index) for point in points]
        last = values[-1] if values else None
        grid.add_row(
            Text(name, "dim"), "–" if last is None else form(last), Text(spark(values, width), "cyan")
        )

    add("running", "running", "{:.0f}".format)
    add("waiting", "waiting", "{:.0f}".format)
    add("queued", "queued", "{:.0f}".format)
    add("tokens/s", "generated_tokens", "{:.0f}".format)
    add("KV in use", "kv_usage", "{:.0%}".format)
    add("hit rate", "hit_rate", "{:.0%}".format)
    add("first token p50", "ttft_s", seconds, 0)
    add("first token p95", "ttft_s", seconds, 1)
    add("between tokens p50", "itl_s", seconds, 0)
    add("between tokens p95", "itl_s", seconds, 1)
    return _beside(grid)


def _beside(grid: Table) -> Table:
    """The rows in two columns, so that they take half the lines."""
    cells = [[*column.cells] for column in grid.columns]
    half = (grid.row_count + 1) // 2
    both = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in range(half):
        other = row + half
        right = [column[other] for column in cells] if other < grid.row_count else []
        both.add_row(*(column[row] for column in cells), *right)
    return both


def _workers(seen: dict[str, Any], rates: dict[str, float], wide: bool, most: int | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, collapse_padding=True)
    table.add_column("worker", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=max(map(len, STATES)))
    numbers = ("running", "waiting", "KV used", "cached", "tokens/s", "hits")
    for name in (*numbers, "prefill", "below", "heard") if wide else numbers:
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    shown = _first(seen["workers"], most)
    for worker in shown:
        kv = worker["kv"]
        total = kv["total"] or 1
        seats = "" if worker["max_running"] is None else f"/{worker['max_running']}"
        queried = worker["query_tokens"]
        rate = rates.get(worker["id"])
        cells: list[str | Text] = [
            escape(worker["id"]),
            Text(worker["state"], STATES.get(worker["state"], "bold red")),
            f"{worker['running']}{seats}",
            str(worker["waiting"]),
            f"{kv['used'] / total:.0%}",
            f"{kv['cached'] / total:.0%}",
            "–" if rate is None else f"{rate:.0f}",
            f"{worker['hit_tokens'] / queried:.0%}" if queried else "–",
        ]
        if wide:
            cells += [str(worker["prefill_tokens"]), _tiers(worker["tiers"]), seconds(worker["heard_s"])]
        table.add_row(*cells)
    if shown and len(shown) < len(seen["workers"]):
        table.add_row(Text(f"and {len(seen['workers']) - len(shown)} more", "dim"))
    return table


def _first(workers: list[dict[str, Any]], most: int | None) -> list[dict[str, Any]]:
    """Where not all have room, those that do not serve come first; one line is for the number of the rest."""
    if most is None or len(workers) <= most:
        return workers
    return sorted(workers, key=lambda worker: worker["state"] == "serving")[: max(0, most - 1)]


def _changes(seen: dict[str, Any]) -> Iterator[Text]:
    """One line of who came and went of late: a worker that is gone has no row to say so."""
    recent = [change for change in seen.get("changes", []) if change["at"] > seen["at"] - CHANGED_S]
    if not recent:
        return
    line = Text(no_wrap=True, overflow="ellipsis")
    for change in reversed(recent[-CHANGES:]):
        words = f"{change['worker_id']} {change['what']} {seconds(max(0.0, seen['at'] - change['at']))} ago"
        line.append(("  " if line else "") + words, "red" if change["what"] == "lost" else "dim")
    yield line


def _tiers(tiers: dict[str, Any]) -> str:
    told = [
        f"{name} {tier['used'] / tier['total']:.0%}" if tier["total"] else f"{name} off"
        for name, tier in tiers.items()
    ]
    return ", ".join(told) or "–"


def _placements(seen: dict[str, Any], count: int, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, collapse_padding=True, expand=True)
    shown = seen["placements"][:count]
    for name in ("prompt", "cached", "waited"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    # the reason is cut before the name is
    longest = max((len(placement["worker_id"] or "") for placement in shown), default=0)
    table.add_column("placed on", no_wrap=True, min_width=max(9, min(longest, PLACED_ON)))
    table.add_column("why", no_wrap=True, overflow="ellipsis", ratio=1)
    wide = width >= WIDE
    if wide:
        room = None if width >= WIDEST else 20
        table.add_column("request", no_wrap=True, overflow="ellipsis", max_width=room)
    for placement in shown:
        cells: list[str | Text] = [
            str(placement["prompt_tokens"]),
            str(placement["hit_tokens"]),
            seconds(placement["waited_s"]),
            escape(placement["worker_id"] or "–"),
            _why(placement),
        ]
        table.add_row(*cells, *([Text(placement["request_id"], "dim")] if wide else []))
    return table


def _why(placement: dict[str, Any]) -> Text:
    """The terms of the chosen worker's cost, and what the next best would have cost."""
    if placement["refused"] is not None:
        return Text(f"refused: {placement['refused']}", "red")
    chosen, *others = placement["considered"] or [None]
    if chosen is None:
        return Text("")
    cost = chosen["cost_s"]
    terms = [f"{word} {seconds(cost[term])}" for term, word in TERMS.items() if cost.get(term)]
    why = Text(f"{seconds(cost['total'])} = " + " + ".join(terms))
    if others:
        why.append(f"; {others[0]['worker_id']} {seconds(others[0]['cost_s']['total'])}", "dim")
    return why


def _pick(value: Any, index: int | None) -> Any:
    return value if index is None or value is None else value[index]

"""`decodefleet top`: asks a server for its fleet's overview, again and again, and shows it in a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from .debug_client import DebugClient, ServerUnavailable
from .fleet_view import fleet_view

# of placements, which workers leave room for
LEAST_PLACEMENTS = 3


def overview(client: DebugClient) -> dict[str, Any]:
    """Raises ServerUnavailable."""
    seen = client.ask("/debug/fleet")
    if not isinstance(seen, dict) or "workers" not in seen:
        raise ServerUnavailable("that is no server of decodefleet")
    return seen


class Rates:
    """Tokens per second of each worker, between one overview and the next."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], tuple[float, int]] = {}

    def of(self, seen: dict[str, Any]) -> dict[str, float]:
        rates, now = {}, {}
        for worker in seen["workers"]:
            key = (worker["id"], worker["incarnation"])
            now[key] = (seen["at"], worker["generated_tokens"])
            at, tokens = self._before.get(key, (seen["at"], 0))
            if seen["at"] > at:
                rates[worker["id"]] = (worker["generated_tokens"] - tokens) / (seen["at"] - at)
        self._before = now
        return rates


def top(
    url: str, api_key: str | None, console: Console, *, once: bool, as_json: bool, interval_s: float
) -> None:
    """Until interrupted, or once. Raises ServerUnavailable for the first answer only; later ones are told."""
    with DebugClient(url, api_key) as client:
        first = overview(client)
        if as_json:
            print(json.dumps(first, indent=2))
        elif once or not console.is_terminal:
            console.print(fleet_view(first, {}, console.width))
        else:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for shown in _views(client, first, console, interval_s):
                    live.update(shown, refresh=True)
                    time.sleep(interval_s)


def _views(
    client: DebugClient, seen: dict[str, Any], console: Console, interval_s: float
) -> Iterator[RenderableType]:
    rates = Rates()
    while True:
        shown = _fitting(seen, rates.of(seen), console)
        yield shown
        while True:
            try:
                seen = overview(client)
                break
            except ServerUnavailable as error:
                yield Group(Text(str(error), "bold red", no_wrap=True, overflow="ellipsis"), shown)


def _fitting(seen: dict[str, Any], rates: dict[str, float], console: Console) -> RenderableType:
    """As many workers and placements as the terminal has lines for, but one, which is for an error."""
    frame = console.render_lines(fleet_view(seen, rates, console.width, 0, 0))
    room = max(LEAST_PLACEMENTS + 1, console.height - len(frame) - 1)
    workers = min(len(seen["workers"]), room - LEAST_PLACEMENTS)
    return fleet_view(seen, rates, console.width, room - workers, workers)

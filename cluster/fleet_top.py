"""`decodefleet top`: asks a server for its fleet's overview, again and again, and shows it in a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from .fleet_view import fleet_view

TIMEOUT_S = 10.0
# head, numbers, and the frames of both tables
OTHER_LINES = 14


class FleetUnavailable(RuntimeError):
    """The overview cannot be had; says why, for people."""


class FleetClient:
    """url: of the server, with or without a path."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(timeout=TIMEOUT_S, headers=headers)

    def close(self) -> None:
        self._http.close()

    def overview(self) -> dict[str, Any]:
        """Raises FleetUnavailable."""
        try:
            answer = self._http.get(f"{self._url}/debug/fleet")
            seen = answer.json()
        except httpx.HTTPError as error:
            raise FleetUnavailable(f"{self._url} does not answer ({error}); --url names another") from error
        except (ValueError, httpx.InvalidURL) as error:
            raise FleetUnavailable(f"{self._url} is no server of decodefleet") from error
        if answer.status_code != 200 or not isinstance(seen, dict) or "workers" not in seen:
            raise FleetUnavailable(f"{self._url}: {_reason(answer.status_code, seen)}")
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
    """Until interrupted, or once. Raises FleetUnavailable for the first answer only; later ones are told."""
    client = FleetClient(url, api_key)
    try:
        first = client.overview()
        if as_json:
            print(json.dumps(first, indent=2))
        elif once:
            console.print(fleet_view(first, {}, console.width))
        else:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for shown in _views(client, first, console, interval_s):
                    live.update(shown, refresh=True)
                    time.sleep(interval_s)
    finally:
        client.close()


def _views(
    client: FleetClient, seen: dict[str, Any], console: Console, interval_s: float
) -> Iterator[RenderableType]:
    rates = Rates()
    while True:
        room = max(1, console.height - len(seen["workers"]) - OTHER_LINES)
        shown = fleet_view(seen, rates.of(seen), console.width, room)
        yield shown
        while True:
            try:
                seen = client.overview()
                break
            except FleetUnavailable as error:
                yield Group(Text(str(error), "bold red"), shown)


def _reason(status: int, body: Any) -> str:
    if status == 401:
        return "it wants an API key (--api-key)"
    if status == 403:
        return "this key may not see the fleet; use an admin key (--api-key)"
    try:
        return str(body["error"]["message"])
    except (KeyError, TypeError):
        return f"it answered {status}"

"""`decodefleet top` beside a running stack."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from decodefleet.cluster import cli
from decodefleet.cluster.debug_client import DebugClient, ServerUnavailable
from decodefleet.cluster.fleet_top import _views, overview


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        monkeypatch.setattr(sys, "argv", ["decodefleet", "top", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


def test_once_and_for_programs(stack: Any, run: Callable[..., Any]) -> None:
    status, out, _ = run("--url", stack.url, "--once")
    assert status == 0
    assert "2 of 2 workers serve" in out
    # whoever reads through a pipe gets it once, too: there is no screen to draw anew
    status, out, _ = run("--url", stack.url)
    assert (status, "2 of 2 workers serve" in out) == (0, True)
    status, out, _ = run("--url", f"{stack.url}/", "--json")
    assert status == 0
    assert [worker["id"] for worker in json.loads(out)["workers"]] == ["worker-0", "worker-1"]


def test_what_cannot_be_asked_is_one_red_line(
    make_stack: Callable[..., Any], run: Callable[..., Any]
) -> None:
    keyed = make_stack(workers=0, api_keys=("right",))
    for url, reason in (
        ("http://127.0.0.1:1", "does not answer"),
        ("nowhere", "does not answer"),
        (f"{keyed.url}/health", "there is no /health/debug/fleet"),
        (keyed.url, "wants an API key"),
    ):
        status, _, err = run("--url", url, "--once")
        assert status == 1
        assert reason in " ".join(err.split())
        assert "This is a bug" not in err
    status, out, _ = run("--url", keyed.url, "--once", "--api-key", "right")
    assert (status, "no model yet" in out) == (0, True)


def test_the_last_view_stays_while_the_server_is_away(stack: Any) -> None:
    console = Console(width=100)
    with DebugClient(stack.url) as client:
        views = _views(client, overview(client), Console(width=100, height=40), 0.0)

        def view() -> str:
            with console.capture() as captured:
                console.print(next(views))
            return captured.get()

        assert "workers serve" in view()
        client._url = "http://127.0.0.1:1"
        away = view()
        assert "does not answer" in away
        assert "workers serve" in away
        with pytest.raises(ServerUnavailable):
            overview(client)
        client._url = stack.url
        assert "does not answer" not in view()

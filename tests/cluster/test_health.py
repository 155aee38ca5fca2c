"""What a container's health check finds; with a whole server it is asked in `tests/e2e/test_serve.py`."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decodefleet.cluster import health
from decodefleet.cluster.processes import free_ports


class Server(http.server.ThreadingHTTPServer):
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.send_response(self.server.status if self.path == "/ready" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all runs, here empty; the real one may hold those of others."""
    monkeypatch.setattr(health, "RUNS", tmp_path)
    # nobody is to be asked for this machine
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    return tmp_path


def start(runs: Path, name: str, url: str) -> Path:
    folder = runs / f"{health.PREFIX}{name}"
    folder.mkdir()
    health.leave_address(folder, url)
    return folder


def test_the_exit_status_follows_the_server(
    runs: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    start(runs, "a", server.url)
    assert health.main() == 0
    server.status = 503
    assert health.main() == 1
    assert capsys.readouterr().out.splitlines() == [f"{server.url} is ready", f"{server.url} answers 503"]


def test_one_that_is_gone_counts_until_it_is_forgotten(
    runs: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    start(runs, "a", server.url)
    gone = start(runs, "b", f"http://127.0.0.1:{free_ports(1)[0]}")
    assert health.main() == 1
    assert "does not answer" in capsys.readouterr().out
    health.forget_address(gone)
    assert health.main() == 0


def test_a_second_start_at_the_same_address_is_the_same_server(runs: Path, server: Server) -> None:
    # a container that was killed keeps its files, and starts with the same command
    start(runs, "a", server.url)
    start(runs, "b", server.url)
    assert health.main() == 0


def test_without_any_server_nothing_is_ready(runs: Path) -> None:
    assert health.main() == 1
    (runs / "decodefleet-logs-only").mkdir()
    assert health.main() == 1


def test_another_users_file_is_not_followed(
    runs: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(runs, "a", server.url)
    monkeypatch.setattr(health.os, "getuid", lambda: -1)
    assert health.addresses() == set()


def test_it_is_light() -> None:
    # it is started every ten seconds
    code = (
        "import sys\n"
        "import decodefleet.cluster.health\n"
        "ours = [name for name in sys.modules if name.startswith('decodefleet')]\n"
        "assert set(ours) == {'decodefleet', 'decodefleet.cluster', 'decodefleet.cluster.health'}, ours\n"
        "assert not {'typer', 'pydantic', 'httpx'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

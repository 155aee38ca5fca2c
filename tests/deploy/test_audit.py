"""The audit of the pinned versions, with the real pip-audit and a service that speaks OSV's API here."""

from __future__ import annotations

import http.server
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "audit.py"
CANARY = {"id": "GHSA-canary", "affected": []}
FLAW = {
    "id": "GHSA-1",
    "aliases": ["CVE-1"],
    "affected": [
        {
            "package": {"name": "six", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.18"}]}],
        }
    ],
}


class Service:
    """Answers by package name; one that is not there has no advisories."""

    def __init__(self) -> None:
        self.flaws: dict[str, list[dict[str, Any]]] = {"jinja2": [CANARY]}
        self.status = 200
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                flaws = service.flaws.get(asked["package"]["name"])
                self.send_response(service.status)
                self.end_headers()
                self.wfile.write(json.dumps({"vulns": flaws} if flaws else {}).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/query"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    service = Service()
    yield service
    service.server.shutdown()
    service.server.server_close()


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules["audit"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    file = tmp_path / "pins.txt"
    file.write_text("six==1.17.0\n")
    return file


def run(audit: ModuleType, service: Service, pins: Path, *more: str, **accepted: str) -> int:
    known = {name.replace("_", "-"): reason for name, reason in accepted.items()}
    return int(audit.main(["--pins", str(pins), "--osv-url", service.url, *more], known))


def test_a_known_flaw_fails(
    audit: ModuleType, service: Service, pins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.flaws["six"] = [FLAW]
    assert run(audit, service, pins) == 1
    assert "VULNERABLE: six 1.17.0: CVE-1 = GHSA-1; fixed in 1.18" in capsys.readouterr().err


def test_an_accepted_one_does_not_by_any_of_its_names(
    audit: ModuleType, service: Service, pins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.flaws["six"] = [FLAW]
    assert run(audit, service, pins, CVE_1="not called", CVE_2="gone") == 0
    said = capsys.readouterr()
    assert "0 advisories, 1 more accepted" in said.out
    assert "CVE-2 is accepted in audit.py, but no longer there" in said.err
    assert "CVE-1" not in said.err


def test_nothing_known_passes(
    audit: ModuleType, service: Service, pins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(audit, service, pins, "--require") == 0
    assert "NOT AUDITED" not in capsys.readouterr().err


def test_without_a_service_it_says_so_and_goes_on(
    audit: ModuleType, service: Service, pins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.server.server_close()
    assert run(audit, service, pins) == 0
    assert "NOT AUDITED: pins.txt was not checked" in capsys.readouterr().err


@pytest.mark.parametrize("trouble", ["refuses", "knows nothing"])
def test_required_advisories_that_cannot_be_had_are_a_status_of_their_own(
    audit: ModuleType, service: Service, pins: Path, trouble: str
) -> None:
    if trouble == "refuses":
        service.status = 503
    else:
        service.flaws.clear()
    assert run(audit, service, pins, "--require") == audit.UNANSWERED


def test_a_package_that_was_left_out_is_not_taken_for_clean(audit: ModuleType) -> None:
    report = {"dependencies": [{"name": "six", "skip_reason": "not found"}]}
    with pytest.raises(audit.NoAdvisories, match="not found"):
        audit.findings(report)


def test_every_pin_is_exact(audit: ModuleType) -> None:
    lines = [line for line in audit.PINS.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    assert all(line.count("==") == 1 for line in lines)

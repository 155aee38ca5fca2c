"""What `decodefleet top` says where it is not shown the fleet; the rest is `tests/e2e/test_top.py`."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from decodefleet.cluster.api.errors import Forbidden, Unauthorized
from decodefleet.cluster.fleet_top import FleetClient, FleetUnavailable

ERRORS = {
    "/open": Unauthorized("no key"),
    "/tenant": Forbidden("this needs an admin key", code="not_admin"),
}


class Refuses(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        error = ERRORS[self.path.removesuffix("/debug/fleet")]
        self.send_response(error.status)
        self.end_headers()
        self.wfile.write(error.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "said"), [("/open", "wants an API key"), ("/tenant", "may not see the fleet; use an admin key")]
)
def test_it_says_which_key_is_needed(url: str, path: str, said: str) -> None:
    client = FleetClient(url + path, "key")
    with pytest.raises(FleetUnavailable, match=said):
        client.overview()
    client.close()

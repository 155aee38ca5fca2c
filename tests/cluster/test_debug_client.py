"""What `decodefleet top` and `directory` say where a server does not tell; the rest is in `tests/e2e`."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from decodefleet.cluster.api.errors import ApiError, Forbidden, Unauthorized
from decodefleet.cluster.debug_client import DebugClient, ServerUnavailable
from decodefleet.cluster.directory_view import Question, answer
from decodefleet.cluster.fleet_top import overview

ERRORS: dict[str, ApiError] = {
    "/open": Unauthorized("no key"),
    "/tenant": Forbidden("this needs an admin key", code="not_admin"),
}
OTHERS = {"/page": b"<html>It works!</html>", "/list": b"[1]", "/newer": b'{"workers_by_name": {}}'}


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("/debug/")[0]
        error = ERRORS.get(path)
        self.send_response(error.status if error is not None else 200)
        self.end_headers()
        self.wfile.write(error.body if error is not None else OTHERS[path])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # nobody is there, and nobody has to be: a proxy is for other machines
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/open", "wants an API key"),
        ("/tenant", "may not see the fleet; use an admin key"),
        ("/page", "is no server of decodefleet"),
        ("/list", "is no server of decodefleet"),
        ("/newer", "is no server of decodefleet"),
    ],
)
def test_top_says_what_is_wrong(url: str, path: str, said: str) -> None:
    with (
        DebugClient((url + path).removeprefix("http://"), "key") as client,
        pytest.raises(ServerUnavailable, match=said),
    ):
        overview(client)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/open", "wants an API key"),
        ("/page", "is no server of decodefleet"),
        ("/newer", "what this version does not know"),
    ],
)
def test_directory_says_it_too(url: str, path: str, said: str) -> None:
    with pytest.raises(ServerUnavailable, match=said):
        answer(Question(url=url + path))

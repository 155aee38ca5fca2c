"""Serve's HAProxy as we have it run: its own failures are ours in shape, and a takeover loses no router."""

from __future__ import annotations

import http.server
import re
import resource
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from raw_http import exchange

from decodefleet.cluster import haproxy_command, http_proxy, local_ray
from decodefleet.cluster.processes import free_ports, port_is_free

# of Serve's template what this is about
CONFIG = """global
    stats socket {folder}/admin.sock mode 666 level admin expose-fd listeners
    maxconn 100
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server {server_s}
    timeout http-request {head_s}
    option redispatch 1
    retry-on {retry_on}
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
    errorfile 504 {folder}/500.http
frontend http_frontend
    bind 127.0.0.1:{port}
    # (used for both ingress-request-router dispatch and static use_backend selection below).
{rules}    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path not found. Ping http://.../-/routes."
"""
ROUTED = "    use_backend routers\n"
BACKEND = "backend routers\n    http-reuse always\n    server one 127.0.0.1:{router}\n"


class Proxy:
    """HAProxy as Serve runs it, with a port where a router may or may not be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = http_proxy.prepare(folder)
        self.port, self.router = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, *options: str, routed: bool = True, server_s: str = "30s", head_s: str = "30s"
    ) -> subprocess.Popen[bytes]:
        text = CONFIG.format(
            folder=self.folder,
            port=self.port,
            rules=ROUTED if routed else "",
            server_s=server_s,
            head_s=head_s,
            retry_on=local_ray.environment(self.folder, 1.0)["RAY_SERVE_HAPROXY_RETRY_ON"],
        )
        text += BACKEND.format(router=self.router) if routed else ""
        config = self.folder / "haproxy.cfg"
        config.write_text(text)
        (self.folder / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\n\r\n")
        process = subprocess.Popen(
            [self.command, "-db", "-f", config, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.processes.append(process)
        return process

    def ask(self, path: str = "/v1/models") -> httpx.Response:
        """The first answer that comes."""
        while True:
            try:
                return httpx.get(self.url + path, trust_env=False)
            except httpx.ConnectError:
                time.sleep(0.02)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path)
    yield proxy
    proxy.stop()


@pytest.fixture
def serve_router(proxy: Proxy) -> Iterator[Callable[[type[http.server.BaseHTTPRequestHandler]], None]]:
    """Starts a router of whatever manners on the port where HAProxy expects one."""
    servers: list[Any] = []

    def start(handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", proxy.router), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None:
        return


class Dies(Answers):
    def do_GET(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)


class Waits(Answers):
    def do_GET(self) -> None:
        time.sleep(0.5)


class LeavesAfterOne(Answers):
    """Keeps the connection, and closes it when something comes over it again."""

    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        self.handle_one_request()
        self.connection.recv(1, socket.MSG_PEEK)


def assert_error(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, None)
    assert error["message"]
    assert error["type"].endswith("_error")


def test_no_router_is_503_with_retry_after(proxy: Proxy) -> None:
    proxy.start()
    answer = proxy.ask()
    assert_error(answer, 503, "no_router")
    assert answer.headers["retry-after"] == "1"


def test_a_router_that_dies_with_the_request_is_502(proxy: Proxy, serve_router: Callable[..., None]) -> None:
    serve_router(Dies)
    proxy.start()
    answer = proxy.ask()
    assert_error(answer, 502, "router_lost")
    assert answer.headers["retry-after"] == "1"


def test_a_router_that_leaves_takes_no_request_along(proxy: Proxy, serve_router: Callable[..., None]) -> None:
    serve_router(LeavesAfterOne)
    proxy.start()
    assert [proxy.ask().text for _ in range(4)] == ["ok"] * 4


def test_a_silent_router_is_504(proxy: Proxy, serve_router: Callable[..., None]) -> None:
    serve_router(Waits)
    proxy.start(server_s="100ms")
    assert_error(proxy.ask(), 504, "deadline")


def test_before_any_router_is_known_it_is_503_and_not_404(proxy: Proxy) -> None:
    proxy.start(routed=False)
    assert_error(proxy.ask(), 503, "no_router")


def test_a_new_manager_knows_the_routers_of_the_one_that_died(
    proxy: Proxy, serve_router: Callable[..., None]
) -> None:
    serve_router(Answers)
    first = proxy.start()
    assert proxy.ask().text == "ok"
    first.kill()
    first.wait()
    second = proxy.start(routed=False)
    assert proxy.ask().text == "ok"
    # the new one reloads for something else before it hears of routers
    proxy.start("-sf", str(second.pid), routed=False)
    second.wait()
    assert proxy.ask().text == "ok"


def test_a_reload_without_routers_forgets_them(proxy: Proxy, serve_router: Callable[..., None]) -> None:
    serve_router(Answers)
    first = proxy.start()
    assert proxy.ask().text == "ok"
    proxy.start("-sf", str(first.pid), routed=False)
    first.wait()
    assert_error(proxy.ask(), 503, "no_router")


def test_what_a_killed_manager_left_listening_is_ended(
    proxy: Proxy, serve_router: Callable[..., None]
) -> None:
    serve_router(Answers)
    orphan = proxy.start()
    assert proxy.ask().text == "ok"
    proxy.start()
    assert orphan.wait(timeout=60) == 0
    assert proxy.ask().text == "ok"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nx-bomb: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 3000 + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nbad name: y\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello over TLS\r\n\r\n",
    ],
    ids=["long header", "many headers", "bad header", "two lengths", "unknown coding", "TLS"],
)
def test_what_is_no_http_is_400(proxy: Proxy, serve_router: Callable[..., None], data: bytes) -> None:
    serve_router(Answers)
    proxy.start()
    assert proxy.ask().text == "ok"
    assert exchange(proxy.url, data).startswith(b"HTTP/1.1 400 ")
    assert proxy.ask().text == "ok"


def test_a_head_that_does_not_come_is_408(proxy: Proxy, serve_router: Callable[..., None]) -> None:
    serve_router(Answers)
    proxy.start(head_s="100ms")
    assert proxy.ask().text == "ok"
    assert exchange(proxy.url, b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: ").startswith(b"HTTP/1.1 408 ")


def test_a_head_has_its_time_unless_serve_says_another() -> None:
    edited = haproxy_command.impatient("defaults\n    mode http\n    timeout client 3600s\n")
    assert f"defaults\n    timeout http-request {haproxy_command.HEAD_S}s\n" in edited
    assert haproxy_command.impatient(edited) == edited


def test_pages_say_how_long_they_are() -> None:
    pages = dict(http_proxy.error_pages())
    assert set(pages) == set(haproxy_command.STATUSES)
    for status, page in pages.items():
        head, _, body = page.partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode())
        assert f"content-length: {len(body)}".encode() in head.split(b"\r\n")


def serves_template() -> str:
    # without importing it, which warns
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "serve/_private/haproxy_templates.py").read_text()


def test_serves_template_has_what_is_replaced() -> None:
    """A new Serve may word its configuration differently: then this is to be looked at again."""
    edited = haproxy_command.with_pages(serves_template(), Path("/pages"))
    assert "Ping http" not in edited
    assert "deny_status 503" in edited
    assert edited.count("    errorfile ") == len(haproxy_command.STATUSES)
    assert "defaults\n    errorfile 502 /pages/502.http" in edited
    assert haproxy_command.has_routers(edited)
    without = [line for line in edited.splitlines() if not line.strip().startswith("use_backend ")]
    assert not haproxy_command.has_routers("\n".join(without))


def test_where_few_files_may_be_open_there_are_fewer_connections() -> None:
    text = serves_template().partition('"""global')[2].replace("{{ config.maxconn }}", "20000")
    text = f"global{text}"
    assert haproxy_command.fitting(text, 1 << 20) == text
    assert haproxy_command.fitting(text, resource.RLIM_INFINITY) == text
    fewer = haproxy_command.fitting(text, 20_000)
    assert re.findall(r"^ +maxconn (\d+)", fewer, re.MULTILINE) == ["7920"]
    assert fewer.replace("maxconn 7920", "maxconn 20000") == text


def test_it_starts_where_it_could_not(tmp_path: Path) -> None:
    (free_port,) = free_ports(1)
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "global\n    maxconn 20000\ndefaults\n    mode http\n    timeout connect 5s\n    timeout client 5s\n"
        f"    timeout server 5s\nfrontend http_frontend\n    bind 127.0.0.1:{free_port}\n"
    )
    started = f"ulimit -n 4096; exec {shlex.quote(str(http_proxy.prepare(tmp_path)))} -db -f {config}"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(["bash", "-c", started], stderr=log)
    try:
        while port_is_free("127.0.0.1", free_port):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        assert "1558 connections instead of 20000" in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()


def as_rendered(host: str) -> str:
    """What Serve's template says of ports, with the numbers filled in."""
    lines = [line for line in serves_template().splitlines() if line.strip().startswith("bind ")]
    found = {name: line for name in ("metrics_port", "stats_port") for line in lines if name in line}
    return "\n".join(
        (
            "frontend prometheus",
            found["metrics_port"].replace("{{ config.metrics_port }}", "9101"),
            "frontend http_frontend",
            f"    bind {host}:8000",
            "listen stats",
            found["stats_port"].replace("{{ config.stats_port }}", "8404"),
        )
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_statistics_stay_on_this_machine_and_metrics_where_the_api_is(host: str) -> None:
    narrowed = haproxy_command.narrowed(as_rendered(host)).splitlines()
    assert [line.strip() for line in narrowed if "bind" in line] == [
        f"bind {host}:9101",
        f"bind {host}:8000",
        "bind 127.0.0.1:8404",
    ]

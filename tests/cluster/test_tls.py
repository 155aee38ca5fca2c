"""HTTPS with the server's own certificate: what is refused, and HAProxy itself speaking it."""

from __future__ import annotations

import http.server
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import make_certificate
from pydantic import ValidationError

from decodefleet.cluster import haproxy_command, http_proxy
from decodefleet.cluster.config import ConfigError, ServeConfig, load_config
from decodefleet.cluster.health import trouble, unverified
from decodefleet.cluster.processes import free_ports
from decodefleet.cluster.tls import TlsOptions, UnusableCertificate

CONFIG = """global
    maxconn 100
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
frontend http_frontend
    bind 127.0.0.1:{port}
    use_backend routers
backend routers
    server one 127.0.0.1:{router}
"""


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return make_certificate(tmp_path / "tls")


@pytest.fixture
def https_port(tmp_path: Path, files: tuple[Path, Path]) -> Iterator[int]:
    """Where HAProxy listens, as Serve starts it, with a router behind."""
    router = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=router.serve_forever, daemon=True).start()
    (port,) = free_ports(1)
    command = http_proxy.prepare(tmp_path, TlsOptions(ssl_certfile=files[0], ssl_keyfile=files[1]).pem())
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(port=port, router=router.server_port))
    process = subprocess.Popen([command, "-db", "-f", config], stderr=subprocess.DEVNULL)
    while not accepts(port):
        assert process.poll() is None
        time.sleep(0.02)
    yield port
    process.kill()
    process.wait()
    router.shutdown()
    router.server_close()


def accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_the_api_is_https_for_whoever_trusts_the_certificate(
    https_port: int, files: tuple[Path, Path]
) -> None:
    trusting = ssl.create_default_context(cafile=files[0])
    for host in ("localhost", "127.0.0.1"):
        url = f"https://{host}:{https_port}/"
        assert httpx.get(url, verify=trusting, trust_env=False).text == "ok"
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(url, trust_env=False)


def test_clients_of_ours_trust_what_ssl_cert_file_names(
    https_port: int, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    url = f"https://127.0.0.1:{https_port}/"
    # as top and directory ask, and as bench does
    assert httpx.get(url).text == "ok"
    with urllib.request.urlopen(url, context=ssl.create_default_context()) as answer:
        assert answer.read() == b"ok"


def test_we_ask_ourselves_whatever_name_the_certificate_has(https_port: int) -> None:
    assert trouble(f"https://127.0.0.1:{https_port}") is None
    assert "does not answer" in (trouble(f"http://127.0.0.1:{https_port}") or "")


def test_nothing_is_served_in_the_clear(https_port: int) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{https_port}/", trust_env=False)


def test_old_versions_of_the_protocol_are_refused(https_port: int) -> None:
    context = unverified()
    with pytest.warns(DeprecationWarning, match=r"TLSv1_1"):
        context.minimum_version = ssl.TLSVersion.TLSv1_1
    with pytest.warns(DeprecationWarning, match=r"TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    # or this side's OpenSSL would refuse by itself
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        socket.create_connection(("127.0.0.1", https_port)) as plain,
        pytest.raises(ssl.SSLError, match="ALERT"),
    ):
        context.wrap_socket(plain)


def test_only_we_can_read_the_key(tmp_path: Path, files: tuple[Path, Path]) -> None:
    http_proxy.prepare(tmp_path, TlsOptions(ssl_certfile=files[0], ssl_keyfile=files[1]).pem())
    file = tmp_path / haproxy_command.CERTIFICATE
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_bytes() == files[0].read_bytes() + files[1].read_bytes()


def test_a_configuration_without_the_frontend_is_not_served_without_tls() -> None:
    with pytest.raises(SystemExit, match="TLS"):
        haproxy_command.with_tls("frontend other\n    bind 127.0.0.1:8000\n", Path("/c.pem"))


def test_only_the_port_of_the_api_changes() -> None:
    text = (
        "frontend prometheus\n    bind :9101\nfrontend http_frontend\n    bind 0.0.0.0:8000\n    mode http\n"
    )
    edited = haproxy_command.with_tls(text, Path("/c.pem"))
    assert edited.splitlines()[1] == "    bind :9101"
    assert edited.splitlines()[3].startswith("    bind 0.0.0.0:8000 ssl crt /c.pem ssl-min-ver TLSv1.2")
    # what a later start looks for at the same address
    assert haproxy_command.frontends(edited) == haproxy_command.frontends(text)


def test_without_a_certificate_there_is_none() -> None:
    assert TlsOptions().pem() is None
    assert ServeConfig().url == "http://127.0.0.1:8000"


def test_one_file_without_the_other_is_refused(files: tuple[Path, Path]) -> None:
    with pytest.raises(ValidationError, match="together"):
        TlsOptions(ssl_certfile=files[0])


def test_files_that_do_not_fit_are_named_before_anything_starts(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    certificate, key = files
    _, other = make_certificate(tmp_path / "other")
    _, locked = make_certificate(tmp_path / "locked", password=b"sesame")
    absent = tmp_path / "absent.pem"
    for pair in ((certificate, other), (certificate, locked), (certificate, absent), (key, key)):
        with pytest.raises(UnusableCertificate, match=str(tmp_path)):
            TlsOptions(ssl_certfile=pair[0], ssl_keyfile=pair[1]).pem()
    with pytest.raises(ConfigError, match="ssl_certfile"):
        load_config({"ssl_certfile": certificate, "ssl_keyfile": other})


def test_the_address_is_https_then(files: tuple[Path, Path]) -> None:
    loaded = load_config({"ssl_certfile": files[0], "ssl_keyfile": files[1], "host": "::"})
    assert loaded.config.url == "https://[::1]:8000"


def test_a_cluster_that_is_there_has_proxies_of_its_own(files: tuple[Path, Path]) -> None:
    given = {"ssl_certfile": files[0], "ssl_keyfile": files[1], "address": "auto", "redis_url": "redis://r"}
    with pytest.raises(ConfigError, match="end TLS before"):
        load_config(given, env={"DECODEFLEET_CLUSTER_SECRET": "s"})

"""A port of its own for one process: its metrics, for those who scrape each process rather than the fleet,
and whether it is ready, for those who mind processes.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

log = logging.getLogger(__name__)

# processes of one machine are told the same first port
TRIES = 64


class ProcessMetrics:
    """Serves from a thread, until `close`: GET /metrics, what `read` gives and the process' CPU and memory;
    GET /ready, 200 or 503.

    first_port: the first free port from there on is taken; 0 for any. read, ready: called by another thread.
    Raises OSError where none is free.
    """

    def __init__(
        self,
        host: str,
        first_port: int,
        read: Callable[[], str],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._server = _bind(host, first_port, lambda: read() + generate_latest(registry).decode(), ready)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        log.info("metrics of this process at http://%s:%d/metrics", host, self.port)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _bind(
    host: str, first_port: int, read: Callable[[], str], ready: Callable[[], bool]
) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/ready":
                self.send_response(200 if ready() else 503)
                self.send_header("content-length", "0")
                self.end_headers()
            elif path == "/metrics":
                self._send_metrics()
            else:
                self.send_error(404)

        def _send_metrics(self) -> None:
            try:
                body = read().encode()
            except Exception:
                log.exception("metrics cannot be read")
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("content-type", CONTENT_TYPE_LATEST)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    last = first_port if first_port == 0 else min(first_port + TRIES, 65_536) - 1
    for port in range(first_port, last + 1):
        try:
            server = _Server((host, port), Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == last:
                raise
        else:
            return server
    raise AssertionError("unreachable")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # else two processes could share a port, and each scrape would find the one or the other
    allow_reuse_address = False
    allow_reuse_port = False

"""Around every request: its id and trace are echoed, its status counted by endpoint, one line logged."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..observability.exchange import CLIENT_LEFT, Exchange
from ..observability.request_log import is_quiet, log_exchange
from ..observability.router_metrics import RouterMetrics
from ..observability.tracing import RESPONSE_HEADER, response_header
from .settings import ApiSettings

if TYPE_CHECKING:
    from ..observability.spans import Tracing

HEADER = "x-request-id"
MAX_ID = 128


class Observe:
    """ASGI middleware. Counts by route template, never by path, so that the labels stay few."""

    def __init__(
        self, app: ASGIApp, metrics: RouterMetrics, settings: ApiSettings, tracing: Tracing | None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._settings = settings
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = Exchange(request_id_of(headers), scope["method"])
        if self._tracing is not None and not is_quiet(scope["path"]):
            exchange.span = self._tracing.begin(headers)
        scope.setdefault("state", {})["exchange"] = exchange

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._begin(exchange, scope, message)
            await send(message)

        try:
            await self._app(scope, receive, send_observed)
        finally:
            self._end(exchange)

    def _begin(self, exchange: Exchange, scope: Scope, message: Message) -> None:
        answer = MutableHeaders(scope=message)
        if self._settings.echo_request_id:
            answer[HEADER] = exchange.request_id
        if exchange.span is not None:
            answer[RESPONSE_HEADER] = response_header(exchange.span)
        exchange.route = getattr(scope.get("route"), "path", "other")
        exchange.status = message["status"]
        self._metrics.requests.labels(exchange.route, str(exchange.status)).inc()

    def _end(self, exchange: Exchange) -> None:
        exchange.ended = time.monotonic()
        if exchange.status is None and exchange.error is None:
            exchange.error = CLIENT_LEFT
        if self._settings.access_log:
            log_exchange(exchange, as_fields=self._settings.log_fields)
        if self._tracing is not None:
            self._tracing.end(exchange)


def request_id_of(headers: Headers) -> str:
    """The client's, where it can stand in a header and a log line; else a new one."""
    given = headers.get(HEADER, "")
    usable = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID
    return given if usable else token_hex(16)

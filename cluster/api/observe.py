"""Around every request: its id is echoed, and its status counted by endpoint."""

from __future__ import annotations

from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..observability.router_metrics import RouterMetrics

HEADER = "x-request-id"
MAX_ID = 128


class Observe:
    """ASGI middleware. Counts by route template, never by path, so that the labels stay few."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        usable = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID
        request_id = given if usable else uuid4().hex

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, send_observed)

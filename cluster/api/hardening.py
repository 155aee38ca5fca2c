"""Headers that make browsers careful, and which other sites' pages may call the API: none, unless told."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# where an endpoint says nothing else itself
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # answers are of one client's key
    "cache-control": "no-store",
}


class Hardened:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str] = ()) -> None:
        self._headers = dict(HEADERS)
        self._app = app
        if allowed_origins:
            self._headers["cross-origin-resource-policy"] = "cross-origin"
            self._app = CORSMiddleware(
                app,
                allow_origins=allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=[
                    *("authorization", "content-type", "x-request-id", "x-session-id"),
                    *("traceparent", "tracestate"),
                ],
                expose_headers=["x-request-id", "retry-after", "traceresponse"],
                # keys travel in a header that scripts set, never in cookies
                allow_credentials=False,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_hardened)

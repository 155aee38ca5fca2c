"""Asks a running server what its /debug endpoints tell, for the commands that show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

TIMEOUT_S = 30.0
ELSEWHERE = "--url names another"
# a proxy named in the environment is for reaching other machines
HERE = ("localhost", "127.0.0.1", "[::1]")


class ServerUnavailable(RuntimeError):
    """A server is not there, or does not tell; says why, for people."""


class DebugClient:
    """url: of the server, with or without a path; http:// may be left out.

    elsewhere: what to do where nobody answers there.
    """

    def __init__(self, url: str, api_key: str | None = None, elsewhere: str = ELSEWHERE) -> None:
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._elsewhere = elsewhere
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        direct = {f"all://{host}": None for host in HERE}
        self._http = httpx.Client(timeout=TIMEOUT_S, headers=headers, mounts=direct)

    def __enter__(self) -> DebugClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(
        self, path: str, *, params: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> Any:
        """The document that is answered; with a body it is posted. Raises ServerUnavailable."""
        method = "GET" if body is None else "POST"
        try:
            answer = self._http.request(method, self._url + path, params=params, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnavailable(f"{self._url} does not answer ({error}); {self._elsewhere}") from error
        try:
            document = answer.json()
        except ValueError:
            raise ServerUnavailable(f"{self._url} is no server of decodefleet") from None
        if answer.status_code != 200:
            raise ServerUnavailable(
                f"{self._url} answers {answer.status_code}: {_reason(answer.status_code, document)}"
            )
        return document


def _reason(status: int, document: Any) -> str:
    if status == 401:
        return "it wants an API key (--api-key)"
    if status == 403:
        return "this key may not see the fleet; use an admin key (--api-key)"
    try:
        return str(document["error"]["message"])
    except (KeyError, TypeError):
        return "for reasons of its own"

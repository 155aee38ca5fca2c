"""The page at `/` and its files, read once from the package.

No file is looked up on disk by what a client asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from .errors import NotFound

# beside what every answer has: no inline script or style, nothing from elsewhere, and no other site's frame
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    # one page for everybody, kept by browsers as long as it is current
    "cache-control": "no-cache",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str
    etag: str


class StaticPage:
    """Answers a browser that has a file already with 304."""

    def __init__(self) -> None:
        folder = files(__package__) / "page"
        self._files = {
            entry.name: _read(entry.read_bytes(), entry.name)
            for entry in folder.iterdir()
            if entry.name.rpartition(".")[2] in _TYPES
        }

    def index(self, request: Request) -> Response:
        return self.file(request, "index.html")

    def file(self, request: Request, name: str) -> Response:
        """Raises NotFound."""
        found = self._files.get(name)
        if found is None:
            raise NotFound(f"there is no page/{name[:200]}", code="unknown_path")
        headers = HEADERS | {"etag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.content, headers=headers, media_type=found.media_type)


def _read(content: bytes, name: str) -> _File:
    digest = blake2b(content, digest_size=12).hexdigest()
    return _File(content, _TYPES[name.rpartition(".")[2]], f'"{digest}"')

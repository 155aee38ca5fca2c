"""The page's files: all there, nothing inline, nothing from elsewhere, nothing but them to be had."""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from decodefleet.cluster.api.errors import NotFound
from decodefleet.cluster.api.static_page import StaticPage

FOLDER = files("decodefleet.cluster.api") / "page"
NAMES = sorted(entry.name for entry in FOLDER.iterdir())


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@pytest.fixture
def client() -> httpx.AsyncClient:
    app, page = FastAPI(), StaticPage()

    @app.get("/{name:path}")
    async def file(request: Request, name: str) -> Response:
        try:
            return page.file(request, name) if name else page.index(request)
        except NotFound:
            return Response(status_code=404)

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page")


async def test_every_file_is_served_once_and_then_known(client: httpx.AsyncClient) -> None:
    for name in NAMES:
        first = await client.get(f"/{name}")
        assert first.status_code == 200
        assert first.text == text_of(name)
        assert "default-src 'none'" in first.headers["content-security-policy"]
        assert "unsafe" not in first.headers["content-security-policy"]
        again = await client.get(f"/{name}", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert (await client.get("/")).text == text_of("index.html")


@pytest.mark.parametrize("name", ["static_page.py", "..%2fapp.py", "%2e%2e/app.py", "page", "index.html%00"])
async def test_nothing_else_can_be_had(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/{name}")).status_code == 404


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    html = text_of("index.html")
    assert not re.search(r"\son\w+\s*=|\sstyle\s*=|<style|<script(?![^>]*\ssrc=)|javascript:", html)
    for name in NAMES:
        addresses = set(re.findall(r"https?://[^\s\"']+", text_of(name)))
        assert addresses <= {"http://www.w3.org/2000/svg"}
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text_of(name)
        )
        assert not re.search(r"localStorage|sessionStorage|document\.cookie", text_of(name))


def test_what_the_page_names_is_there() -> None:
    html = text_of("index.html")
    for named in re.findall(r'(?:href|src)="page/([^"]+)"', html):
        assert named in NAMES
    modules = "\n".join(text_of(name) for name in NAMES if name.endswith(".js"))
    for named in re.findall(r'from "\./([^"]+)"', modules):
        assert named in NAMES
    ids = set(re.findall(r'\sid="([^"]+)"', html))
    assert set(re.findall(r'byId\("([\w-]+)"\)', modules)) <= ids
    for owner in re.findall(r'(?:for|aria-controls|aria-labelledby)="([^"]+)"', html):
        assert owner in ids

from __future__ import annotations

import asyncio

import pytest

from decodefleet.cluster.bench.http import HttpClient, Target

BODY = b'{"prompt": [1, 2], "max_tokens": 3}'


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", Target("localhost", 8000)),
        ("http://localhost:8000/", Target("localhost", 8000)),
        ("http://localhost:8000/v1", Target("localhost", 8000)),
        ("localhost:9", Target("localhost", 9)),
        ("http://host", Target("host", 80)),
        ("https://host/base/v1/", Target("host", 443, "/base", tls=True)),
        ("http://[::1]:8000", Target("::1", 8000)),
    ],
)
def test_target(url: str, expected: Target) -> None:
    assert Target.parse(url) == expected


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://host/?q=1"])
def test_target_refuses_what_is_no_server(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected http|Port"):
        Target.parse(url)


async def test_connections_are_kept_and_reused(serving) -> None:
    async with serving() as server:
        client = HttpClient(Target.parse(server.url), {}, timeout_s=10)
        for _ in range(3):
            exchange = await client.request("POST", "/v1/completions", BODY)
            assert (exchange.status, exchange.failure) == (200, None)
            assert exchange.body.endswith(b"data: [DONE]\n\n")
        assert server.connections == 1
        await client.close()


async def test_without_keep_alive_each_request_has_its_own_connection(serving) -> None:
    async with serving() as server:
        client = HttpClient(Target.parse(server.url), {}, timeout_s=10, keep_alive=False)
        for _ in range(3):
            assert (await client.request("POST", "/v1/completions", BODY)).failure is None
        assert server.connections == 3
        assert all(headers["connection"] == "close" for headers in server.headers)


async def test_a_connection_that_the_server_dropped_while_idle_is_replaced(serving) -> None:
    async with serving(drop_idle=True) as server:
        client = HttpClient(Target.parse(server.url), {}, timeout_s=10)
        for _ in range(5):
            exchange = await client.request("POST", "/v1/completions", BODY)
            assert exchange.failure is None
        assert len(server.bodies) == 5
        await client.close()


async def test_headers_reach_the_server(serving) -> None:
    async with serving() as server:
        client = HttpClient(Target.parse(server.url), {"Authorization": "Bearer key"}, timeout_s=10)
        await client.request("POST", "/v1/completions", BODY)
        assert server.headers[0]["authorization"] == "Bearer key"
        await client.close()


async def test_a_server_that_closes_mid_stream_is_a_disconnect(serving) -> None:
    async with serving(cut_after=2) as server:
        client = HttpClient(Target.parse(server.url), {}, timeout_s=10)
        exchange = await client.request("POST", "/v1/completions", BODY)
        assert (exchange.status, exchange.failure) == (200, "disconnect")
        # the request had reached the server: it must not be sent twice
        assert len(server.bodies) == 1


async def test_nobody_listens() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    client = HttpClient(Target("127.0.0.1", port), {}, timeout_s=10)
    assert (await client.request("GET", "/v1/models")).failure == "connect"


async def test_timeout(serving) -> None:
    async with serving(token_delay_s=30) as server:
        client = HttpClient(Target.parse(server.url), {}, timeout_s=0.05)
        exchange = await client.request("POST", "/v1/completions", BODY)
        assert exchange.failure == "timeout"
        await client.close()


async def test_garbage_is_reported() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = HttpClient(Target("127.0.0.1", server.sockets[0].getsockname()[1]), {}, timeout_s=10)
    assert (await client.request("GET", "/")).failure == "bad http"
    server.close()
    await server.wait_closed()

"""An OpenAI-compatible backend that does nothing but stream, as fast as one Python process can.

    python tests/bench/fake_openai.py --port 9000 --step-ms 20

Every stream gets one token at each step. HTTP by hand: what is measured is what stands in front of it.
Answers any GET with 200, which is enough for routers' health checks and questions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re

_MAX_TOKENS = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
_COMPLETION = re.compile(rb"POST /v1/(chat/)?completions[ ?]")
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_ABOUT = json.dumps(
    {
        "object": "list",
        "data": [{"id": "tiny", "object": "model"}],
        "model_path": "tiny",
        "model_id": "tiny",
        "served_model_name": "tiny",
        "is_generation": True,
        "status": "ok",
    }
).encode()


def event(data: bytes) -> bytes:
    line = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


def piece(finish: str | None) -> bytes:
    choice = {"index": 0, "text": " tok", "logprobs": None, "finish_reason": finish}
    return event(
        json.dumps(
            {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice]}
        ).encode()
    )


_TOKEN, _LAST = piece(None), piece("length") + event(b"[DONE]") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """streams: of the whole server; connection -> tokens left."""

    def __init__(self, streams: dict[Connection, int]) -> None:
        self._streams = streams
        self._received = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = _LENGTH.search(head)
        body = int(length[1]) if length else 0
        if len(rest) < body:
            return
        self._received = rest[body:]
        wanted = _MAX_TOKENS.search(rest[:body])
        if _COMPLETION.match(head) and wanted:
            self.transport.write(_HEAD)
            self._streams[self] = int(wanted[1])
        elif head.startswith(b"GET"):
            about = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(about % len(_ABOUT) + _ABOUT)
        else:
            # an engine's own endpoints, which routers try
            self.transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")


async def serve(port: int, step_s: float) -> None:
    loop = asyncio.get_running_loop()
    streams: dict[Connection, int] = {}
    server = await loop.create_server(lambda: Connection(streams), "127.0.0.1", port)
    async with server:
        due = loop.time()
        while True:
            due = max(due + step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            for connection, left in [*streams.items()]:
                connection.transport.write(_TOKEN if left > 1 else _LAST)
                if left > 1:
                    streams[connection] = left - 1
                else:
                    del streams[connection]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.step_ms / 1000))


if __name__ == "__main__":
    main()

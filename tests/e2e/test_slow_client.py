"""A client that does not read is held back, then cut; nobody else notices."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from raw_http import connect, post
from waiting import until

from decodefleet.cluster.dataplane import streams


def send_request(url: str, body: dict[str, Any]) -> socket.socket:
    # a small window, so that what is not read does not hide in the kernel
    connection = connect(url, receive_buffer=4096)
    connection.sendall(post("/v1/completions", body, connection="close"))
    return connection


def test_what_a_client_does_not_read_is_not_generated(
    make_stack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_BUFFERED", 200)
    stack = make_stack(workers=1, step_s=0.0, max_model_len=60_000)
    endless = {"prompt": "on and on", "max_tokens": 50_000, "ignore_eos": True, "stream": True}
    with send_request(stack.url, endless | {"logprobs": 20}) as lazy:
        # the worker is told to stop long before all is generated, with the client still connected
        while stack.scheduler.core.fleet.current("worker-0").stats.finished.get("abort", 0) == 0:
            brief = httpx.post(f"{stack.url}/v1/completions", json={"prompt": "hello", "max_tokens": 2})
            assert brief.status_code == 200
        received = b""
        while data := lazy.recv(1 << 16):
            received += data
    events = [line for line in received.split(b"\r\n") if line.startswith(b"data: ")]
    assert b"not taken in time" in events[-2] + events[-1]
    assert b"[DONE]" in events[-1]
    assert len(events) < 50_000


def test_a_client_that_never_reads_again_is_cut(make_stack: Callable[..., Any]) -> None:
    stack = make_stack(workers=1, step_s=0.0, max_model_len=60_000, stall_s=0.2)
    endless = {"prompt": "on and on", "max_tokens": 50_000, "ignore_eos": True, "stream": True}
    with send_request(stack.url, endless | {"logprobs": 20}):
        until(lambda: stack.scheduler.core.log.recent(1) and not [*stack.scheduler.core.ledger])
    until(lambda: stack.router.metrics.in_flight._value.get() == 0)

"""A worker finds out that a router is gone, whether or not it has anything to say to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from live_worker import LONG, Worker
from relay import Relay

from decodefleet.worker import router_links, transport
from decodefleet.worker.config import BatchConfig
from decodefleet.worker.protocol import Heartbeat, Pulse, StepOutput


def test_a_worker_tells_its_routers_that_it_lives(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_links, "PULSE_S", 0.05)
    worker = make_worker()
    worker.ready()
    router, stranger = worker.router(), worker.router("stranger")
    router.send(worker.submit("a"))
    router.deltas("a")
    for _ in range(2):
        assert router.wait(Pulse) == Pulse(worker_id="w0", incarnation=worker.server.incarnation)
    assert not stranger.socket.poll(0)


def test_what_waits_for_a_router_that_has_gone_is_dropped_before_its_turn(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_links, "PULSE_S", 0.05)
    worker = make_worker(batch=BatchConfig(max_num_seqs=1))
    worker.ready()
    router, leaver = worker.router(), worker.router("leaver")
    router.send(worker.submit("runs", params=LONG))
    router.wait(StepOutput)
    for name in ("a", "b"):
        leaver.send(worker.submit(name))
    worker.supervisor.wait(Heartbeat, lambda beat: beat.stats.waiting == 2)
    leaver.socket.close(linger=0)
    beat = worker.supervisor.wait(Heartbeat, lambda beat: beat.stats.waiting == 0)
    assert (beat.stats.running, beat.stats.finished) == (1, {"abort": 2})


def test_what_runs_for_a_router_that_is_cut_off_is_dropped(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is reset and the socket's buffers are far from full; it comes back and is served again."""
    monkeypatch.setattr(transport, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(transport, "HEARTBEAT_TIMEOUT_MS", 400)
    worker = make_worker()
    worker.ready()
    relay = Relay(worker.server.endpoint)
    try:
        router = worker.router("far away", endpoint=relay.endpoint)
        router.send(worker.submit("a", params=LONG))
        router.wait(StepOutput)
        relay.cut()
        worker.wait_idle(abort=1)
        relay.heal()
        router.send(worker.submit("b"))
        assert len(router.deltas("b")) == 5
        worker.wait_idle(abort=1, length=1)
    finally:
        relay.close()

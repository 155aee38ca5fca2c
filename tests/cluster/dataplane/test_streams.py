"""A stream between a receive loop that never waits and a consumer that does."""

from __future__ import annotations

import asyncio

import pytest

from decodefleet.cluster.dataplane import streams
from decodefleet.cluster.dataplane.errors import ConsumerTooSlow, WorkerLost, WorkerRejected
from decodefleet.cluster.dataplane.streams import TokenStream
from decodefleet.worker.protocol import Rejected, TokenDelta


class Recorded:
    def __init__(self, n: int = 1) -> None:
        self.aborts: list[int | None] = []
        self.closed = 0
        self.stream = TokenStream(range(n), self.aborts.append, self._on_close)

    def _on_close(self) -> None:
        self.closed += 1


def delta(index: int = 0, token: int = 1, end: bool = False) -> TokenDelta:
    return TokenDelta(request_id="a", index=index, tokens=(token,), finish_reason="stop" if end else None)


async def test_all_that_is_there_is_taken_at_once() -> None:
    recorded = Recorded()
    for token in range(3):
        recorded.stream.put(delta(token=token))
    assert [taken.tokens for taken in await recorded.stream.take()] == [(0,), (1,), (2,)]
    waiting = asyncio.create_task(recorded.stream.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    recorded.stream.put(delta(token=9, end=True))
    assert [taken.tokens for taken in await waiting] == [(9,)]


async def test_an_error_comes_after_what_is_buffered_and_the_first_counts() -> None:
    recorded = Recorded()
    recorded.stream.put(delta())
    recorded.stream.fail(WorkerLost("gone"))
    recorded.stream.fail(ConsumerTooSlow("later"))
    recorded.stream.put(delta())
    assert len(await recorded.stream.take()) == 1
    with pytest.raises(WorkerLost):
        await recorded.stream.take()


async def test_closing_aborts_what_has_not_ended() -> None:
    recorded = Recorded(n=2)
    recorded.stream.put(delta(index=0, end=True))
    recorded.stream.close()
    recorded.stream.close()
    assert recorded.aborts == [None]
    assert recorded.closed == 1


@pytest.mark.parametrize(
    "error", [WorkerLost("x"), WorkerRejected(Rejected(request_id="a", reason="draining", message=""))]
)
async def test_nothing_is_aborted_that_the_worker_does_not_have(error: Exception) -> None:
    recorded = Recorded()
    recorded.stream.fail(error)  # type: ignore[arg-type]
    recorded.stream.close()
    ended = Recorded()
    ended.stream.put(delta(end=True))
    ended.stream.close()
    assert recorded.aborts == ended.aborts == []


async def test_one_sequence_can_be_given_up() -> None:
    recorded = Recorded(n=2)
    recorded.stream.abort_sequence(0)
    recorded.stream.abort_sequence(0)
    recorded.stream.put(delta(index=0))
    recorded.stream.put(delta(index=1))
    assert [taken.index for taken in await recorded.stream.take()] == [1]
    # the last one is the whole request
    recorded.stream.abort_sequence(1)
    recorded.stream.close()
    assert recorded.aborts == [0, None]


async def test_a_slow_consumer_is_cut_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_BUFFERED", 5)
    recorded = Recorded(n=2)
    for token in range(20):
        recorded.stream.put(delta(token=token))
    # the worker is told before the consumer stirs
    assert recorded.aborts == [None]
    assert [taken.tokens[0] for taken in await recorded.stream.take()] == list(range(10))
    with pytest.raises(ConsumerTooSlow):
        await recorded.stream.take()
    recorded.stream.close()
    assert recorded.aborts == [None]

"""The thread between workers: windows, limits, and who is left alone."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from neighbours import lying_peer, slab_frame

from decodefleet.worker.peers.links import HELD_UP_S, MOST_WAITING, WINDOW, Asked, PeerLinks
from decodefleet.worker.peers.wire import MOST_NAMES, Fetch, checksum
from decodefleet.worker.transport import Codec, Security, connect

NAMES = [bytes([number]) * 16 for number in range(4)]


@contextmanager
def running(**options: Any) -> Iterator[PeerLinks]:
    links = PeerLinks("tcp://127.0.0.1:0", options.pop("security", None), **options)
    links.start()
    try:
        yield links
    finally:
        links.close()


class Answers:
    """What was delivered, by request."""

    def __init__(self) -> None:
        self.slabs: dict[tuple[int, int], bytes | None] = {}
        self._changed = threading.Condition()

    def taker(self, request: int) -> Any:
        def take(index: int, slab: memoryview | None) -> None:
            with self._changed:
                assert (request, index) not in self.slabs, "delivered twice"
                self.slabs[request, index] = None if slab is None else bytes(slab)
                self._changed.notify()

        return take

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.slabs) >= count, timeout=30)


def echo(fetch: Fetch) -> Iterable[tuple[bytes, ...]]:
    for index, name in enumerate(fetch.each):
        yield slab_frame(fetch, index, checksum(name, name * 10)), name * 10


def test_more_than_a_window() -> None:
    answers = Answers()
    with lying_peer(echo) as endpoint, running() as links:
        for request in range(5 * WINDOW):
            links.fetch(endpoint, NAMES, "form", answers.taker(request))
        answers.wait_for(5 * WINDOW * 4)
    assert all(slab == NAMES[index] * 10 for (_, index), slab in answers.slabs.items())


def test_no_more_than_a_window_at_once() -> None:
    seen: list[Fetch] = []
    answers = Answers()

    def keep(fetch: Fetch) -> Iterable[tuple[bytes, ...]]:
        seen.append(fetch)
        return ()

    with lying_peer(keep) as endpoint, running(patience_s=0.3) as links:
        for request in range(3 * WINDOW):
            links.fetch(endpoint, NAMES, "form", answers.taker(request))
        answers.wait_for(3 * WINDOW * 4)
        assert len(seen) == WINDOW
        assert set(answers.slabs.values()) == {None}
        # one that failed is not asked for a while
        links.fetch(endpoint, NAMES, "form", answers.taker(-1))
        answers.wait_for(3 * WINDOW * 4 + 4)
        assert len(seen) == WINDOW


def test_who_was_held_up_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers()
    asked, free = threading.Event(), threading.Event()

    def answer(fetch: Fetch) -> Iterable[tuple[bytes, ...]]:
        asked.set()
        assert free.wait(30)
        return echo(fetch)

    with lying_peer(answer) as endpoint, running(patience_s=0.4) as links:
        wait = links._wait

        def be_held_up() -> None:
            if asked.is_set() and not free.is_set():
                time.sleep(HELD_UP_S + 0.1)
                free.set()
            else:
                wait()

        monkeypatch.setattr(links, "_wait", be_held_up)
        links.fetch(endpoint, NAMES, "form", answers.taker(0))
        answers.wait_for(4)
    assert None not in answers.slabs.values()


def test_nobody_there() -> None:
    answers = Answers()
    with running(patience_s=0.1) as links:
        links.fetch("tcp://127.0.0.1:1", NAMES, "form", answers.taker(0))
        answers.wait_for(4)
    assert set(answers.slabs.values()) == {None}


def test_an_endpoint_that_makes_no_sense_is_a_miss() -> None:
    answers = Answers()
    with lying_peer(echo) as endpoint, running() as links:
        links.fetch("nonsense", NAMES, "form", answers.taker(0))
        answers.wait_for(4)
        assert set(answers.slabs.values()) == {None}
        links.fetch(endpoint, NAMES, "form", answers.taker(1))
        answers.wait_for(8)
    assert [answers.slabs[1, index] for index in range(4)] == [name * 10 for name in NAMES]


def test_who_cannot_take_a_block_keeps_nobody_else_from_theirs(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers()
    offered: list[int] = []

    def refuse(index: int, slab: memoryview | None) -> None:
        offered.append(index)
        raise RuntimeError("no room")

    with lying_peer(echo) as endpoint, running() as links:
        links.fetch(endpoint, NAMES, "form", refuse)
        links.fetch(endpoint, NAMES, "form", answers.taker(0))
        answers.wait_for(4)
    assert offered == [0, 1, 2, 3]
    assert None not in answers.slabs.values()
    assert caplog.text.count("could not be taken in") == 4


def test_a_defect_costs_what_is_on_its_way(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    with lying_peer(echo) as endpoint, running() as links:
        with monkeypatch.context() as patched:
            patched.setattr(links, "_read", lambda *_: 1 / 0)
            links.fetch(endpoint, NAMES, "form", answers.taker(0))
            answers.wait_for(4)
        assert set(answers.slabs.values()) == {None}
        links.fetch(endpoint, NAMES, "form", answers.taker(1))
        answers.wait_for(8)
    assert [answers.slabs[1, index] for index in range(4)] == [name * 10 for name in NAMES]
    assert "KV blocks that were on their way are given up" in caplog.text


def test_after_the_end_nothing_is_fetched_or_lent() -> None:
    answers = Answers()
    with running() as links:
        pass
    links.fetch("tcp://127.0.0.1:1", NAMES, "form", answers.taker(0))
    assert set(answers.slabs.values()) == {None}
    # the descriptor that woke the thread may be another file's by now
    links.lend(Asked(b"nobody", Fetch(ticket=1, names=NAMES[0], form="")), 0, b"slab")
    links.close()


def test_what_is_owed_is_settled_at_the_end() -> None:
    answers = Answers()
    with lying_peer(lambda _: ()) as endpoint, running() as links:
        for request in range(2 * WINDOW):
            links.fetch(endpoint, NAMES, "form", answers.taker(request))
    assert len(answers.slabs) == 2 * WINDOW * 4


def test_askers_wait_for_whoever_knows_the_blocks() -> None:
    answers = Answers()
    heard = threading.Event()
    with running(on_asked=heard.set) as lender, running() as links:
        links.fetch(lender.endpoint, NAMES, "form", answers.taker(0))
        assert heard.wait(30)
        asked = lender.asked.popleft()
        assert asked.fetch.each == NAMES
        lender.lend(asked, 0, b"slab")
        lender.lend(asked, 1, None)
        answers.wait_for(2)
        assert answers.slabs == {(0, 0): b"slab", (0, 1): None}


def test_askers_who_make_no_sense_harm_nobody() -> None:
    """Frames that are none, too many, cut short, or ask for what can be no names."""
    answers, codec, context = Answers(), Codec[Any](Fetch), zmq.Context()
    good = codec.encode(Fetch(ticket=1, names=NAMES[0], form="form"))
    heard = threading.Event()
    with running(on_asked=heard.set) as lender, running() as links:
        vandal = connect(context, lender.endpoint, None, "vandal")
        for frames in (
            [b""], [b"\x01garbage"], [good, good], [good, b"", good], [good[:-3]], [b"\x09" + good[1:]],
            [b"\x01" + b"\x91" * 5000], [os.urandom(1 << 20)],
            [codec.encode(Fetch(ticket=1, names=b"", form="form"))],
            [codec.encode(Fetch(ticket=1, names=NAMES[0][:-1], form="form"))],
            [codec.encode(Fetch(ticket=1, names=NAMES[0] * (MOST_NAMES + 1), form="form"))],
        ):  # fmt: skip
            vandal.send_multipart(frames)
        # what it asks for last is heard after all that
        vandal.send(good)
        assert heard.wait(30)
        heard.clear()
        assert lender.asked.popleft().fetch.each == NAMES[:1]
        links.fetch(lender.endpoint, NAMES, "form", answers.taker(0))
        assert heard.wait(30)
        (asked,) = lender.asked
        assert asked.fetch.each == NAMES
    context.destroy(linger=0)


def test_more_askers_than_can_wait_get_nothing() -> None:
    answers = Answers()
    with running() as lender, contextlib.ExitStack() as stack:
        askers = [stack.enter_context(running()) for _ in range(3)]
        # as if others had asked already
        lender.asked.extend([Asked(b"nobody", Fetch(ticket=1, names=NAMES[0], form=""))] * MOST_WAITING)
        for request, links in enumerate(askers):
            links.fetch(lender.endpoint, NAMES, "form", answers.taker(request))
        answers.wait_for(12)
        assert len(lender.asked) == MOST_WAITING
    assert set(answers.slabs.values()) == {None}


@pytest.mark.parametrize("theirs", [None, Security.from_secret("another")])
def test_strangers_get_nothing(theirs: Security | None) -> None:
    answers = Answers()
    with (
        running(security=Security.from_secret("hush")) as lender,
        running(security=theirs, patience_s=0.5) as links,
    ):
        links.fetch(lender.endpoint, NAMES, "form", answers.taker(0))
        answers.wait_for(4)
        assert not lender.asked
    assert set(answers.slabs.values()) == {None}


def test_unsound_requests_are_ignored() -> None:
    assert not Fetch(ticket=1, names=b"", form="").sound
    assert not Fetch(ticket=1, names=bytes(17), form="").sound
    assert not Fetch(ticket=1, names=bytes(16 * (MOST_NAMES + 1)), form="").sound
    assert Fetch(ticket=1, names=bytes(16 * MOST_NAMES), form="").sound


def test_never_started_can_be_closed() -> None:
    answers, links = Answers(), PeerLinks("tcp://127.0.0.1:0", None)
    links.fetch("tcp://127.0.0.1:1", NAMES, "form", answers.taker(0))
    links.close()
    assert answers.slabs == {(0, index): None for index in range(4)}

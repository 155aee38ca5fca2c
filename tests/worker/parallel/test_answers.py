"""What ranks say beside the steps: at once where there is room, never in the way of a step, in order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from decodefleet.worker.engine_api import RankLost
from decodefleet.worker.parallel.answers import AnswerReader, AnswerSender

# far more than a socket holds
MANY = 5000


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def words(number: int) -> bytes:
    return number.to_bytes(4, "little") * 20


def test_all_that_was_said_is_heard_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    reader, sender = AnswerReader(), AnswerSender(theirs)
    reader.add(ours)
    assert reader.hear() == []
    for number in range(3):
        sender.send(words(number))
    # of one rank, and in one call: the next may be a step away
    assert reader.hear() == [words(number) for number in range(3)]


def test_nobody_waits_for_room(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    sender = AnswerSender(theirs)

    def say() -> None:
        for number in range(MANY):
            sender.send(words(number))

    speaking = threading.Thread(target=say, daemon=True)
    speaking.start()
    speaking.join(30)
    assert not speaking.is_alive(), "a rank waits for rank 0"
    reader = AnswerReader()
    reader.add(ours)
    heard: list[bytes] = []
    while len(heard) < MANY:
        heard += reader.hear(30)
    assert heard == [words(number) for number in range(MANY)]


def test_a_rank_that_is_gone_is_lost(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    reader = AnswerReader()
    reader.add(ours)
    theirs.close()
    with pytest.raises(RankLost, match="has ended"):
        reader.hear(30)


def test_without_rank_0_it_says_so(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    sender = AnswerSender(theirs)
    ours.close()
    with pytest.raises(OSError, match="pipe"):
        sender.send(b"done")

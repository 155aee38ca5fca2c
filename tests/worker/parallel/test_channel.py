"""Messages between real sockets and real shared memory, both ends in this process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from decodefleet.worker.engine_api import RankLost
from decodefleet.worker.parallel.channel import SLOTS, Receiver, Sender, make_memory

Ends = tuple[Sender, list[Receiver], list[socket.socket]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A sender with two receivers, and the receivers' sockets."""
    memory = make_memory()
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    theirs = [other for _, other in pairs]
    yield Sender(memory, [own for own, _ in pairs]), [Receiver(memory, other) for other in theirs], theirs
    os.close(memory)
    for pair in pairs:
        for each in pair:
            each.close()


def test_numbers_and_arrays_arrive_as_they_were(ends: Ends) -> None:
    sender, receivers, _ = ends
    arrays = [
        np.arange(12).reshape(3, 4),
        np.arange(5, dtype=np.int32),
        np.zeros((2, 0), dtype=np.int64),
        np.zeros(0, dtype=np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3),
    ]
    for turn in range(3 * SLOTS):
        sender.send([7, turn, -1], [array + turn for array in arrays])
        for receiver in receivers:
            message = receiver.receive()
            assert message is not None
            assert message[0] == [7, turn, -1]
            for sent, got in zip(arrays, message[1], strict=True):
                assert got.dtype == sent.dtype
                np.testing.assert_array_equal(got, sent + turn)
            receiver.release()


def test_no_message_is_overwritten_before_it_was_read(ends: Ends) -> None:
    """A sender that runs ahead waits for the slower receiver."""
    sender, receivers, _ = ends
    total = 10 * SLOTS
    sent: list[int] = []

    def run() -> None:
        for turn in range(total):
            sender.send([turn], [np.full(1000, turn)])
            sent.append(turn)

    thread = threading.Thread(target=run)
    thread.start()
    for turn in range(total):
        for receiver in receivers:
            message = receiver.receive()
            assert message is not None
            assert message[0] == [turn]
            assert (message[1][0] == turn).all()
            # the slot of this one is not free yet
            assert len(sent) <= turn + SLOTS
            receiver.release()
    thread.join()
    assert len(sent) == total


def test_who_is_gone_is_lost(ends: Ends) -> None:
    sender, _, theirs = ends
    theirs[1].close()
    with pytest.raises(RankLost):
        sender.send([1], [])


def test_a_receiver_learns_that_the_sender_is_gone() -> None:
    memory = make_memory()
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver = Receiver(memory, other)
    own.close()
    assert receiver.receive() is None
    other.close()
    os.close(memory)

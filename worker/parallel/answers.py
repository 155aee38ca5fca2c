"""What the ranks of a model have to say to rank 0 while they follow: words, each rank's in its order, over a
socket of its own (SOCK_SEQPACKET). Both ends. Knows nothing of what the words mean."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from contextlib import suppress

from ..engine_api import RankLost

MESSAGE_BYTES = 1 << 16


class AnswerReader:
    """Rank 0's end. One thread."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.poll()

    def add(self, rank: socket.socket) -> None:
        self._sockets[rank.fileno()] = rank
        self._poll.register(rank, select.POLLIN)

    def hear(self, timeout_s: float = 0.0) -> list[bytes]:
        """All that ranks have said; waits up to the timeout for the first of it.

        Raises RankLost where one is gone.
        """
        heard: list[bytes] = []
        while ready := self._poll.poll(1000 * timeout_s):
            for number, _ in ready:
                words = self._sockets[number].recv(MESSAGE_BYTES)
                if not words:
                    raise RankLost("a rank of the model has ended")
                heard.append(words)
            timeout_s = 0.0
        return heard

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()


class AnswerSender:
    """A rank's end. Nobody waits for room in the socket: rank 0 may be in a step that waits for this rank.

    What there is room for has been sent when `send` returns; the rest is sent by a thread.
    """

    def __init__(self, leader: socket.socket) -> None:
        self._leader = leader
        # no more than rank 0 has asked for
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._send_rest, name="rank-answers", daemon=True).start()

    def send(self, words: bytes) -> None:
        """Any thread. Raises OSError where rank 0 is gone."""
        with self._changed:
            if not self._waiting:
                with suppress(BlockingIOError):
                    self._leader.send(words, socket.MSG_DONTWAIT)
                    return
            self._waiting.append(words)
            self._changed.notify()

    def _send_rest(self) -> None:
        # without rank 0 the process ends, by who listens to it
        with suppress(OSError):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                    words = self._waiting[0]
                # those that come meanwhile wait behind it
                self._leader.send(words)
                with self._changed:
                    self._waiting.popleft()

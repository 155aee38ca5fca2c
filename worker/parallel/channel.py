"""From rank 0 to the others of a host: numbers and arrays through shared memory, a doorbell for each.

A message lies in one of a few slots: a header of int64 (how many numbers and arrays, the numbers, and each
array's type and shape), then the bytes of the arrays. Doorbells and receipts are datagrams of one byte; a
closed socket says that the other side is gone, however it went. The memory has no name, so nothing of it is
left behind. Knows no steps.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine_api import RankLost

Array = NDArray[Any]
Message = tuple[list[int], list[Array]]

SLOTS = 4
# pages that no message reaches are never taken from the machine
SLOT_BYTES = 256 << 20
HEADER_WORDS = 256
ALIGNMENT = 16
DTYPES = (np.dtype(np.int64), np.dtype(np.int32))
BELL, RECEIPT = b"\1", b"\2"
# of a follower that has messages to read
PATIENCE_S = 60.0


def make_memory() -> int:
    """A file descriptor, to be inherited by the followers."""
    memory = os.memfd_create("decodefleet-steps")
    os.ftruncate(memory, SLOTS * SLOT_BYTES)
    return memory


class Sender:
    def __init__(self, memory: int, sockets: Sequence[socket.socket]) -> None:
        """sockets: SOCK_SEQPACKET, one to each follower."""
        self._slots = _map(memory)
        self._sockets = sockets
        self._sent = 0
        for each in sockets:
            each.settimeout(PATIENCE_S)

    def send(self, numbers: Sequence[int], arrays: Sequence[Array]) -> None:
        """arrays: contiguous, of one or two dimensions. Raises RankLost where a follower is gone or hangs."""
        try:
            if self._sent >= SLOTS:
                # each has read what was in the slot before
                for each in self._sockets:
                    if each.recv(1) != RECEIPT:
                        raise RankLost("a rank of the model has ended")
            _write(self._slots[self._sent % SLOTS], numbers, arrays)
            self._sent += 1
            for each in self._sockets:
                each.send(BELL)
        except OSError as error:
            raise RankLost(f"a rank of the model takes no more steps: {error}") from error


class Receiver:
    def __init__(self, memory: int, socket_: socket.socket) -> None:
        self._slots = _map(memory)
        self._socket = socket_
        self._received = 0

    def receive(self) -> Message | None:
        """Waits for the next message; None where rank 0 is gone. The arrays are valid until `release`."""
        try:
            if self._socket.recv(1) != BELL:
                return None
        except ConnectionResetError:
            # it went with receipts unread
            return None
        slot = self._slots[self._received % SLOTS]
        self._received += 1
        return _read(slot)

    def release(self) -> None:
        """The message received last has been read."""
        self._socket.send(RECEIPT)


def _map(memory: int) -> list[NDArray[np.uint8]]:
    whole = np.frombuffer(mmap.mmap(memory, SLOTS * SLOT_BYTES), dtype=np.uint8)
    return list(whole.reshape(SLOTS, SLOT_BYTES))


def _write(slot: NDArray[np.uint8], numbers: Sequence[int], arrays: Sequence[Array]) -> None:
    header = [len(numbers), len(arrays), *numbers]
    end = 8 * HEADER_WORDS
    for array in arrays:
        columns = array.shape[1] if array.ndim == 2 else -1
        header += DTYPES.index(array.dtype), array.shape[0], columns
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + array.nbytes
        if end > SLOT_BYTES:
            raise RuntimeError(f"a step of {end} bytes is more than {SLOT_BYTES}: lower --max-num-seqs")
        if array.nbytes:
            slot[start:end] = array.reshape(-1).view(np.uint8)
    assert len(header) <= HEADER_WORDS, "more arrays than any step has"
    slot[: 8 * len(header)].view(np.int64)[:] = header


def _read(slot: NDArray[np.uint8]) -> Message:
    words: list[int] = slot[: 8 * HEADER_WORDS].view(np.int64).tolist()
    shapes = 2 + words[0]
    arrays: list[Array] = []
    end = 8 * HEADER_WORDS
    for place in range(shapes, shapes + 3 * words[1], 3):
        dtype, rows, columns = DTYPES[words[place]], words[place + 1], words[place + 2]
        shape = (rows,) if columns < 0 else (rows, columns)
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + dtype.itemsize * rows * abs(columns)
        arrays.append(slot[start:end].view(dtype).reshape(shape))
    return words[2:shapes], arrays

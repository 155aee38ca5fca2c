"""What one rank has below its part of the main pool: host slots, a slab file, and threads that move bytes.

Every rank has one, and the same block is in the same slot of each. Knows slots and pieces; who decides which
block goes where, and what the others do, is `transfers.py`'s business and its users'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from .copies import Copies, Fence, Pairs
from .host_memory import HostMemory
from .slab_file import SlabFile
from .slots import Entry


class Kind(IntEnum):
    """SAVE: pool to host memory, EVACUATE: the same, before the next step may write the blocks. LOAD: host
    memory to pool. WRITE: host memory to file. READ: file to pool. FETCH: another worker's memory to pool."""

    SAVE = 1
    EVACUATE = 2
    LOAD = 3
    WRITE = 4
    READ = 5
    FETCH = 6


class Piece(NamedTuple):
    """A block's way: those of its places that a kind of move is about. silent: as in `Entry`.

    block: of the pool; host, file: slots there; offer: slot of what another worker is said to hold.
    """

    block: int = 0
    host: int = 0
    file: int = 0
    offer: int = 0
    name: bytes = b""
    silent: bool = False


class Moved(NamedTuple):
    """What came of a move: which pieces are where they were to be, and from when to when it worked.

    Times are of `time.perf_counter`, which the processes of a machine share.
    """

    arrived: list[bool]
    began: float
    ended: float


Outcome = Moved | BaseException
Done = Callable[[Outcome], None]


@dataclass(frozen=True)
class Disk:
    """buffers: in host memory, one for each of `readers` threads, at least."""

    file: SlabFile
    buffers: HostMemory
    readers: int
    read: Executor
    write: Executor
    free: SimpleQueue[int] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        for buffer in range(self.readers):
            self.free.put(buffer)

    def close(self) -> None:
        for executor in (self.read, self.write):
            executor.shutdown(cancel_futures=True)
        self.buffers.close()
        self.file.close()


class Store:
    """memory: the host slots. save, load: executors of one thread. Thread of the steps, but for `close`."""

    def __init__(
        self, copies: Copies, memory: HostMemory, save: Executor, load: Executor, disk: Disk | None
    ) -> None:
        self.disk = disk
        # how a FETCH is begun, where there is anybody to fetch from
        self.fetch: Callable[[Sequence[Piece], Done], Future[Moved]] | None = None
        self._copies = copies
        self._memory = memory
        self._save = save
        self._load = load

    def start(self, kind: Kind, pieces: Sequence[Piece], done: Done) -> Future[Moved]:
        """Begin a move, behind the steps that were submitted; `done` hears its outcome in any thread, before
        the future has it, or not at all where that is cancelled before it began."""
        if kind is Kind.EVACUATE:
            return self._evacuate(pieces, done)
        if kind is Kind.FETCH:
            assert self.fetch is not None, "a move from workers that are not there"
            return self.fetch(pieces, done)
        executor, move = self._work(kind, pieces)
        return executor.submit(_run, move, done)

    def read(self, slot: int) -> bytes:
        """A copy of a host slot, which is filled and pinned. Any thread."""
        return self._memory.slab(slot).numpy().tobytes()

    def clear(self) -> None:
        """Forget what the file holds. Raises OSError."""
        if self.disk is not None:
            self.disk.file.clear()

    def close_disk(self) -> None:
        """Do without it from now on."""
        disk, self.disk = self.disk, None
        if disk is not None:
            disk.close()

    def close(self) -> None:
        for executor in (self._save, self._load):
            executor.shutdown(cancel_futures=True)
        self._memory.close()
        self.close_disk()

    def _work(self, kind: Kind, pieces: Sequence[Piece]) -> tuple[Executor, Callable[[], list[bool]]]:
        # what is written lies in host memory already, and waits for no step
        fence = None if kind is Kind.WRITE else self._copies.fence()
        if kind is Kind.SAVE:
            return self._save, partial(self._copy, self._copies.save, pieces, fence)
        if kind is Kind.LOAD:
            return self._load, partial(self._copy, self._copies.load, pieces, fence)
        assert self.disk is not None, "a move to or from a file that is not there"
        if kind is Kind.WRITE:
            return self.disk.write, partial(self._write, self.disk, pieces)
        return self.disk.read, partial(self._read, self.disk, pieces, fence)

    def _evacuate(self, pieces: Sequence[Piece], done: Done) -> Future[Moved]:
        copied, arrived = self._copies.save_before_next_step(self._slabs(pieces)), [True] * len(pieces)
        if copied is not None:
            return self._save.submit(_run, partial(_await, copied, arrived), done)
        made: Future[Moved] = Future()
        made.set_result(_run(lambda: arrived, done))
        return made

    def _slabs(self, pieces: Sequence[Piece]) -> list[tuple[int, Tensor]]:
        return [(piece.block, self._memory.slab(piece.host)) for piece in pieces]

    def _copy(
        self,
        copy: Callable[[Pairs, Fence], None],
        pieces: Sequence[Piece],
        fence: Fence,
    ) -> list[bool]:
        copy(self._slabs(pieces), fence)
        return [True] * len(pieces)

    def _write(self, disk: Disk, pieces: Sequence[Piece]) -> list[bool]:
        for piece in pieces:
            disk.file.write(_entry(piece), self._memory.pages(piece.host))
        return [True] * len(pieces)

    def _read(self, disk: Disk, pieces: Sequence[Piece], fence: Fence) -> list[bool]:
        buffer = disk.free.get()
        try:
            return [self._read_one(disk, piece, buffer, fence) for piece in pieces]
        finally:
            disk.free.put(buffer)

    def _read_one(self, disk: Disk, piece: Piece, buffer: int, fence: Fence) -> bool:
        intact = disk.file.read(_entry(piece), disk.buffers.pages(buffer))
        if intact:
            self._copies.load([(piece.block, disk.buffers.slab(buffer))], fence)
        return intact


def _entry(piece: Piece) -> Entry:
    return Entry(piece.name, piece.file, piece.silent)


def _await(copied: torch.cuda.Event, arrived: list[bool]) -> list[bool]:
    copied.synchronize()
    return arrived


def _run(move: Callable[[], list[bool]], done: Done) -> Moved:
    began = time.perf_counter()
    try:
        moved = Moved(move(), began, time.perf_counter())
    except BaseException as error:
        done(error)
        raise
    # first: who has waited for the future finds the outcome taken in
    done(moved)
    return moved

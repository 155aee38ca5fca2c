"""Stores of KV blocks on the other ranks: rank 0 says between steps what to move, and hears when it is done.

Both ends. Slots and blocks are rank 0's choice and the same everywhere. Which blocks are worth moving is no
business of this module.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence as Rows
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from torch import Tensor

from ..engine_api import RankLost
from ..kv.hashing import HASH_BYTES
from ..kv.tiers.copies import Copies
from ..kv.tiers.slab_file import SlabForm
from ..kv.tiers.store import Kind, Moved, Outcome, Piece, Store
from ..kv.tiers.store_opening import open_disk, open_store
from .answers import AnswerSender
from .channel import Array
from .gang import Gang
from .orders import Order

# until a rank has made room on its disk
OPEN_S = 600.0

Move = tuple[int, Kind, Rows[Piece]]
"""ticket, kind, pieces"""


class Answer(msgspec.Struct, frozen=True):
    """Of a move, or with ticket None of the opening. Fields as in `Moved`; error: what went wrong instead."""

    ticket: int | None
    arrived: tuple[bool, ...] = ()
    began: float = 0.0
    ended: float = 0.0
    error: str | None = None

    @property
    def outcome(self) -> Outcome:
        if self.error is not None:
            return OSError(self.error)
        return Moved([*self.arrived], self.began, self.ended)

    @staticmethod
    def of(ticket: int, outcome: Outcome) -> Answer:
        if isinstance(outcome, Moved):
            return Answer(ticket, tuple(outcome.arrived), outcome.began, outcome.ended)
        return Answer(ticket, error=str(outcome) or repr(outcome))


class GangStores:
    """Rank 0's end; see `OtherStores`. count: the other ranks."""

    def __init__(self, gang: Gang, count: int) -> None:
        self.count = count
        self._gang = gang
        self._moves: list[Move] = []

    def open(self, host_slots: int, form: SlabForm | None, number: int) -> str | None:
        slots, root = (0, "") if form is None else (form.slots, form.root)
        numbers = [Order.OPEN_STORE, host_slots, slots, number]
        self._gang.send(numbers, [np.frombuffer(bytes.fromhex(root), dtype=np.int32)])
        errors: list[str | None] = []
        while len(errors) < self.count:
            heard = self._gang.hear(OPEN_S)
            if not heard:
                raise RankLost("a rank of the model does not open its KV tiers")
            errors += [msgspec.msgpack.decode(words, type=Answer).error for words in heard]
        return next((error for error in errors if error is not None), None)

    def start(self, ticket: int, kind: Kind, pieces: Rows[Piece]) -> None:
        self._moves.append((ticket, kind, pieces))

    def dispatch(self) -> None:
        if self._moves:
            moves, self._moves = self._moves, []
            self._gang.send([Order.MOVE], pack(moves))

    def answers(self, timeout_s: float = 0.0) -> list[tuple[int, Outcome]]:
        answers = [msgspec.msgpack.decode(words, type=Answer) for words in self._gang.hear(timeout_s)]
        return [(answer.ticket, answer.outcome) for answer in answers if answer.ticket is not None]

    def clear(self) -> None:
        self.dispatch()
        self._gang.send([Order.CLEAR_STORE], [])

    def close_disk(self) -> None:
        self._gang.send([Order.CLOSE_DISK], [])


class StoreFollower:
    """Another rank's end. rank, ranks: which of how many; answers: a socket to rank 0."""

    def __init__(self, folder: Path | None, rank: int, ranks: int, answers: socket.socket) -> None:
        self._folder = folder
        self._rank = rank
        self._ranks = ranks
        self._answers = AnswerSender(answers)
        self._store: Store | None = None

    def open(self, slabs: Tensor, numbers: Rows[int], root: Array) -> None:
        """slabs: the rank's part of the main pool."""
        host_slots, slots, number = numbers
        copies, disk, error = Copies(slabs), None, None
        if slots and self._folder is not None:
            form = SlabForm(root.tobytes().hex(), copies.slab_bytes, slots, self._ranks, self._rank)
            try:
                disk = open_disk(self._folder, form, copies, number)
                disk.file.load_index()
            except OSError as failure:
                error = f"rank {self._rank}: {failure}"
        self._store = open_store(copies, host_slots, disk)
        self._answer(Answer(None, error=error))

    def move(self, arrays: Rows[Array]) -> None:
        """Begin what is asked for; copies that the next step must not overtake are made."""
        assert self._store is not None, "rank 0 moves nothing before stores are open"
        for ticket, kind, pieces in unpack(arrays):
            self._store.start(kind, pieces, partial(self._moved, ticket))

    def clear(self) -> None:
        assert self._store is not None, "rank 0 clears nothing before stores are open"
        self._store.clear()

    def close_disk(self) -> None:
        assert self._store is not None, "rank 0 closes nothing before stores are open"
        self._store.close_disk()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _moved(self, ticket: int, outcome: Outcome) -> None:
        self._answer(Answer.of(ticket, outcome))

    def _answer(self, answer: Answer) -> None:
        self._answers.send(msgspec.msgpack.encode(answer))


def pack(moves: Rows[Move]) -> list[Array]:
    """[moves, 3]: ticket, kind, pieces; [pieces, 4]: places and silence; [pieces, 2]: names."""
    pieces = [piece for _, _, own in moves for piece in own]
    heads = [(ticket, kind, len(own)) for ticket, kind, own in moves]
    places = [(piece.block, piece.host, piece.file, piece.silent) for piece in pieces]
    names = b"".join(piece.name.ljust(HASH_BYTES, b"\0") for piece in pieces)
    return [
        np.array(heads, dtype=np.int64),
        np.array(places, dtype=np.int64),
        np.frombuffer(names, dtype=np.int64).reshape(-1, 2),
    ]


def unpack(arrays: Rows[Array]) -> list[Move]:
    heads, places, names = arrays
    pieces = iter(
        Piece(block, host, file, name=name.tobytes(), silent=bool(silent))
        for (block, host, file, silent), name in zip(places.tolist(), names, strict=True)
    )
    return [
        (ticket, Kind(kind), [next(pieces) for _ in range(count)]) for ticket, kind, count in heads.tolist()
    ]

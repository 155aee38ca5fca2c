"""Another rank's store, as rank 0 drives it through orders."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from decodefleet.worker.kv.tiers.slab_file import SlabForm, open_slab_file
from decodefleet.worker.kv.tiers.store import Kind, Piece
from decodefleet.worker.parallel.answers import AnswerReader
from decodefleet.worker.parallel.stores import Answer, StoreFollower, pack, unpack

SLAB, BLOCKS, SLOTS = 4096, 8, 16
ROOT = bytes(range(16))
FORM = SlabForm(ROOT.hex(), SLAB, SLOTS, tp_size=2, rank=1)


class Rank:
    def __init__(self, folder: Path) -> None:
        self.slabs = torch.zeros((BLOCKS, SLAB), dtype=torch.uint8)
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reader = AnswerReader()
        self._reader.add(self._ours)
        self.store = StoreFollower(folder, 1, 2, self._theirs)

    def open(self) -> Answer:
        self.store.open(self.slabs, [SLOTS, SLOTS, 0], np.frombuffer(ROOT, dtype=np.int32))
        return self.heard(1)[0]

    def heard(self, count: int) -> list[Answer]:
        answers: list[Answer] = []
        while len(answers) < count:
            answers += [msgspec.msgpack.decode(words, type=Answer) for words in self._reader.hear(30)]
        return answers

    def close(self) -> None:
        self.store.close()
        self._ours.close()
        self._theirs.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.close()


def test_moves_travel_whole() -> None:
    moves = [
        (3, Kind.SAVE, [Piece(block=1, host=2), Piece(block=4, host=5)]),
        (4, Kind.READ, [Piece(block=6, file=7, name=bytes(range(16)), silent=True)]),
    ]
    nothing = bytes(16)
    assert unpack(pack(moves)) == [
        (3, Kind.SAVE, [piece._replace(name=nothing) for piece in moves[0][2]]),
        moves[1],
    ]


def test_blocks_go_to_disk_and_come_back(rank: Rank) -> None:
    assert rank.open().error is None
    rank.slabs[1] = 7
    name = bytes(range(16))
    for ticket, kind, piece in (
        (0, Kind.EVACUATE, Piece(block=1, host=2)),
        (1, Kind.WRITE, Piece(host=2, file=3, name=name)),
        (2, Kind.READ, Piece(block=5, file=3, name=name)),
    ):
        rank.store.move(pack([(ticket, kind, [piece])]))
        (answer,) = rank.heard(1)
        assert (answer.ticket, answer.arrived, answer.error) == (ticket, (True,), None)
    assert rank.slabs[5].tolist() == [7] * SLAB


def test_more_preempted_at_once_than_the_socket_holds(rank: Rank) -> None:
    """All before the step of which rank 0 waits for this rank's part, and listens to nothing else."""
    rank.open()
    moves = 3000
    rank.store.move(pack([(i, Kind.EVACUATE, [Piece(block=0, host=i % SLOTS)]) for i in range(moves)]))
    assert [answer.ticket for answer in rank.heard(moves)] == [*range(moves)]


def test_a_disk_that_another_rank_cannot_have_is_given_back(rank: Rank, tmp_path: Path) -> None:
    rank.open()
    with pytest.raises(OSError, match="another process has"):
        open_slab_file(tmp_path, FORM, 0)
    rank.store.close_disk()
    open_slab_file(tmp_path, FORM, 0).close()
    # memory goes on
    rank.store.move(pack([(0, Kind.SAVE, [Piece(block=0, host=1)])]))
    assert rank.heard(1)[0].arrived == (True,)

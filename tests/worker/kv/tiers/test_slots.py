from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decodefleet.worker.kv.tiers.slots import Entry, Slots


def name(i: int) -> bytes:
    return i.to_bytes(16, "little")


def fill(slots: Slots, i: int) -> Entry | None:
    """Who was evicted for block i."""
    reserved = slots.reserve(name(i))
    assert reserved is not None
    entry, evicted = reserved
    assert slots.find(name(i)) is None
    assert slots.fill(entry)
    return evicted


def test_the_least_recently_used_gives_way() -> None:
    slots = Slots(2)
    fill(slots, 1)
    fill(slots, 2)
    slots.touch(name(1))
    evicted = fill(slots, 3)
    assert evicted is not None
    assert evicted.name == name(2)
    assert slots.find(name(1)) is not None
    assert slots.find(name(3)) is not None


def test_a_busy_slot_is_not_given_away() -> None:
    slots = Slots(1)
    fill(slots, 1)
    entry = slots.find(name(1))
    assert entry is not None
    slots.pin(entry)
    assert slots.reserve(name(2)) is None
    slots.unpin(entry)
    assert slots.reserve(name(2)) is not None


def test_a_slot_that_is_read_while_its_block_is_forgotten_is_free_only_after() -> None:
    slots = Slots(1)
    fill(slots, 1)
    entry = slots.find(name(1))
    assert entry is not None
    slots.pin(entry)
    assert slots.discard(name(1)) is entry
    assert name(1) not in slots
    assert slots.reserve(name(2)) is None
    slots.check_integrity()
    slots.unpin(entry)
    assert slots.reserve(name(2)) is not None


def test_what_is_forgotten_while_it_arrives_is_not_found_when_it_is_there() -> None:
    slots = Slots(1)
    reserved = slots.reserve(name(1))
    assert reserved is not None
    slots.clear()
    assert not slots.fill(reserved[0])
    assert slots.find(name(1)) is None
    assert slots.reserve(name(2)) is not None


def test_adopted_blocks_are_evicted_in_their_order() -> None:
    slots = Slots(3)
    slots.adopt([Entry(name(1), 2, filled=True), Entry(name(2), 0, filled=True)])
    assert fill(slots, 3) is None
    evicted = fill(slots, 4)
    assert evicted is not None
    assert evicted.name == name(1)
    slots.check_integrity()


class SlotsMachine(RuleBasedStateMachine):
    """Random use; the accounts add up after each, and all slots come back."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(4)
        self.filling: list[Entry] = []
        self.pinned: list[Entry] = []

    @rule(i=st.integers(0, 8), silent=st.booleans())
    def reserve(self, i: int, silent: bool) -> None:
        if name(i) in self.slots:
            return
        busy = {entry.slot for entry in (*self.filling, *self.pinned)}
        reserved = self.slots.reserve(name(i), silent=silent)
        assert (reserved is None) == (len(busy) == 4)
        if reserved is not None:
            assert reserved[0].slot not in busy
            self.filling.append(reserved[0])

    @precondition(lambda self: self.filling)
    @rule()
    def fill(self) -> None:
        entry = self.filling.pop(0)
        assert self.slots.fill(entry) == (self.slots.find(entry.name) is entry)

    @rule(i=st.integers(0, 8))
    def pin(self, i: int) -> None:
        entry = self.slots.find(name(i))
        if entry is not None:
            self.pinned.append(self.slots.pin(entry))

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.slots.unpin(self.pinned.pop())

    @rule(i=st.integers(0, 8))
    def discard(self, i: int) -> None:
        self.slots.discard(name(i))
        assert self.slots.find(name(i)) is None

    @rule(i=st.integers(0, 8))
    def touch(self, i: int) -> None:
        self.slots.touch(name(i))

    @invariant()
    def accounts_add_up(self) -> None:
        self.slots.check_integrity()

    def teardown(self) -> None:
        while self.filling:
            self.fill()
        while self.pinned:
            self.unpin()
        self.slots.clear()
        for i in range(4):
            assert self.slots.reserve(name(i)) is not None


SlotsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlotsMachine = SlotsMachine.TestCase

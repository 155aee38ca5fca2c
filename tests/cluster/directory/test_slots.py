"""What the publisher believes Redis holds: each slot has one meaning, and what is written adds up to it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from decodefleet.cluster.directory.keys import TIERS, tier_bit
from decodefleet.cluster.directory.slots import Slots, Write

NAMES = [number.to_bytes(16, "big") for number in range(1, 40)]


def put(string: bytearray, write: Write) -> None:
    """SETRANGE."""
    string.extend(bytes(max(0, write.offset + len(write.data) - len(string))))
    string[write.offset : write.offset + len(write.data)] = write.data


def read(hashes: bytearray, tiers: bytearray) -> dict[bytes, int]:
    assert len(hashes) == 16 * len(tiers)
    held = {}
    for slot, mask in enumerate(tiers):
        if mask:
            name = bytes(hashes[16 * slot : 16 * (slot + 1)])
            assert name not in held, "a block in two slots"
            held[name] = mask
    return held


NEWS = st.tuples(st.lists(st.sampled_from(NAMES), max_size=30), st.sampled_from(TIERS), st.booleans())


@settings(deadline=None)
@given(st.lists(st.one_of(NEWS, st.integers(1, 20), st.just("restart")), max_size=40))
def test_strings_and_deltas_tell_what_was_put(operations):
    slots, held, told = Slots(), {}, {}
    hashes, tiers = bytearray(), bytearray()
    for operation in operations:
        if operation == "restart":
            slots.restart()
            told = dict(held)
            hashes, tiers = bytearray(), bytearray()
            for start in range(0, slots.size, 7):
                for string, write in zip((hashes, tiers), slots.span(start, start + 7), strict=True):
                    put(string, write)
        elif isinstance(operation, int):
            changes = slots.take(operation)
            assert len(changes.blocks) <= operation
            for write in changes.hashes:
                put(hashes, write)
            for write in changes.tiers:
                put(tiers, write)
            for block, mask in changes.blocks:
                told.pop(block, None)
                if mask:
                    told[block] = mask
        else:
            blocks, tier, stored = operation
            slots.put(blocks, tier, held=stored)
            for block in blocks:
                mask = held.get(block, 0) | tier_bit(tier) if stored else held.get(block, 0) & ~tier_bit(tier)
                held.pop(block, None)
                if mask:
                    held[block] = mask
        slots.check_integrity()
        assert len(slots) == len(held)
        assert told == held or slots.touched
    changes = slots.take(len(slots.touched))
    for string, writes in ((hashes, changes.hashes), (tiers, changes.tiers)):
        for write in writes:
            put(string, write)
    assert read(hashes, tiers) == held
    # what is gone gives its slot to what comes
    assert slots.size <= len(NAMES)


def test_neighbours_are_written_together():
    slots = Slots()
    slots.put(NAMES[:30], "gpu", held=True)
    assert [len(write.data) for write in slots.take(30).hashes] == [480]
    slots.put([NAMES[2], NAMES[4], NAMES[20]], "cpu", held=True)
    changes = slots.take(3)
    assert [(write.offset, len(write.data)) for write in changes.hashes] == [(32, 48), (320, 16)]
    assert [write.offset for write in changes.tiers] == [2]
    assert changes.tiers[0].data == bytes([3, 1, 3, *[1] * 15, 3])

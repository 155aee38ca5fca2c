"""What the supervisor learns of KV blocks, whichever way its messages are held up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decodefleet.worker.kv.hashing import split_hashes
from decodefleet.worker.kv_journal import KvJournal
from decodefleet.worker.protocol import KvEvents, Tier

BLOCKS = [bytes([number]) * 16 for number in range(4)]
TIERS: tuple[Tier, ...] = ("gpu", "cpu")
CHANGES = st.tuples(st.sampled_from(("stored", "removed")), st.sampled_from(BLOCKS), st.sampled_from(TIERS))
TAKES = st.sampled_from(("sent", "unsent"))


def apply(held: dict[Tier, set[bytes]], events: KvEvents) -> None:
    if events.cleared:
        for blocks in held.values():
            blocks.clear()
    held[events.tier] -= {*split_hashes(events.removed)}
    held[events.tier] |= {*split_hashes(events.stored)}


@given(st.lists(CHANGES | TAKES | st.just("cleared"), max_size=40))
def test_a_reader_ends_up_with_what_is_held(steps: list[object]) -> None:
    journal = KvJournal(max_pending=2, max_blocks=3)
    truth: dict[Tier, set[bytes]] = {tier: set() for tier in TIERS}
    reader: dict[Tier, set[bytes]] = {tier: set() for tier in TIERS}
    seen = []
    for step in [*steps, *["sent"] * 5]:
        match step:
            case "cleared":
                journal.kv_cleared()
                for blocks in truth.values():
                    blocks.clear()
            case "sent":
                if (events := journal.take()) is not None:
                    seen.append(events.seq)
                    apply(reader, events)
            case "unsent":
                if (events := journal.take()) is not None:
                    journal.restore(events)
            case ("stored", bytes() as block, str() as tier):
                journal.kv_stored([block], tier)  # type: ignore[arg-type]
                truth[tier].add(block)  # type: ignore[index]
            case ("removed", bytes() as block, str() as tier):
                journal.kv_removed([block], tier)  # type: ignore[arg-type]
                truth[tier].discard(block)  # type: ignore[index]
    assert reader == truth
    assert not journal.pending
    assert seen == list(range(1, len(seen) + 1))


def test_memory_is_bounded_by_what_is_held() -> None:
    journal = KvJournal(max_pending=100)
    for number in range(10_000):
        journal.kv_stored([number.to_bytes(16, "big")])
        if number >= 50:
            journal.kv_removed([(number - 50).to_bytes(16, "big")])
    assert sum(map(len, journal._pending.values())) <= 50 + 100
    events = journal.take()
    assert events is not None
    assert events.cleared
    assert {*split_hashes(events.stored)} == {number.to_bytes(16, "big") for number in range(9950, 10_000)}


def test_a_message_has_bounded_size() -> None:
    journal = KvJournal(max_blocks=10)
    journal.kv_stored([number.to_bytes(16, "big") for number in range(25)])
    sizes = []
    while (events := journal.take()) is not None:
        sizes.append(len(events.stored) // 16)
    assert sizes == [10, 10, 5]

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
    journal = KvJournal()
    truth: dict[Tier, set[bytes]] = {tier: set() for tier in TIERS}
    reader: dict[Tier, set[bytes]] = {tier: set() for tier in TIERS}
    seen = []
    for step in [*steps, *["sent"] * 3]:
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

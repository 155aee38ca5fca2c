from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodefleet.kernels.paged_attention.plan import INVARIANT_SPLIT
from decodefleet.kernels.paged_attention.reference import KEY_SPLIT
from decodefleet.worker.kv.groups import (
    DROPPED_TOKENS,
    FULL,
    MAX_GROUPS,
    PLAIN,
    KvGroups,
    WindowRule,
    drop_unit,
    layer_rules,
)

SLIDING = WindowRule(512)


def rules(pattern: str) -> list[WindowRule]:
    return [{"f": FULL, "s": SLIDING, "t": WindowRule(64)}[kind] for kind in pattern]


@pytest.mark.parametrize(
    ("pattern", "groups", "block_layers"),
    [
        ("f" * 30, 1, 30),
        ("s" * 32, 1, 32),
        # Gemma 3 270M, 1B, 4B: five sliding, one full
        ("sssssf" * 3, 6, 3),
        ("sssssf" * 4 + "ss", 7, 4),
        ("sssssf" * 5 + "ssss", 7, 5),
        # a pad in one group is cheaper than twenty-five groups
        ("sf" * 12 + "f", 2, 13),
        # one full layer of many: some padding rather than a table for each layer
        ("s" * 31 + "f", 5, 8),
        ("sft", 3, 1),
    ],
)
def test_layers_are_dealt_out_to_equal_groups(pattern: str, groups: int, block_layers: int) -> None:
    dealt = KvGroups.of(rules(pattern))
    assert (len(dealt), dealt.block_layers) == (groups, block_layers)
    assert [dealt.rule_of(layer) for layer in range(len(pattern))] == rules(pattern)
    assert (dealt.groups[0].rule is FULL) == ("f" in pattern)


@given(st.text("fst", min_size=1, max_size=80))
def test_each_layer_has_a_place_of_its_own(pattern: str) -> None:
    dealt = KvGroups.of(rules(pattern))
    assert sorted(dealt.places) == list(range(len(pattern)))
    assert len(set(dealt.places.values())) == len(pattern)
    assert all(place < dealt.block_layers for _, place in dealt.places.values())
    assert len(dealt) <= MAX_GROUPS


def test_the_first_token_seen() -> None:
    assert FULL.first_seen(1000) == 0
    assert [WindowRule(3).first_seen(position) for position in range(5)] == [0, 0, 0, 1, 2]


@settings(deadline=None)
@given(
    window=st.integers(1, 40),
    sinks=st.integers(0, 9),
    size=st.integers(1, 8),
    chunks=st.lists(st.integers(1, 20)),
)
def test_most_blocks_is_never_exceeded_and_nearly_reached(
    window: int, sinks: int, size: int, chunks: list[int]
) -> None:
    rule, longest = WindowRule(window, sinks), max(chunks, default=1)
    computed = 0
    for chunk in chunks:
        kept = {position // size for position in range(min(sinks, computed + chunk))}
        kept |= {position // size for position in range(rule.first_seen(computed), computed + chunk)}
        computed += chunk
        assert len(kept) <= rule.most_blocks(computed, size, longest)
    if sinks == 0 and chunks:
        assert rule.most_blocks(10**6, size, longest) <= -(-(window - 1 + longest) // size) + 1


def test_kernels_split_keys_where_lists_may_drop_entries() -> None:
    """Otherwise a token would meet its keys in other splits once entries were dropped."""
    assert DROPPED_TOKENS % INVARIANT_SPLIT == 0
    assert DROPPED_TOKENS % KEY_SPLIT == 0
    for block_size in (1, 16, 48, 256):
        assert drop_unit(block_size) * block_size % DROPPED_TOKENS == 0


def test_frames() -> None:
    assert (PLAIN.frames, PLAIN.windowed) == ((0,), ())
    sliding = KvGroups.of(rules("ss"))
    assert (sliding.frames, sliding.windowed) == ((1,), (0,))
    hybrid = KvGroups.of(rules("sftsft"))
    assert [group.layers for group in hybrid.groups] == [(1, 4), (0, 3), (2, 5)]
    assert (hybrid.frames, hybrid.windowed) == ((0, 1, 2), (1, 2))


def test_lists_are_short_however_long_the_sequence() -> None:
    assert FULL.most_entries(10**6, 16, chunk=512) == 62500
    # what is live, and what may wait to be dropped
    assert SLIDING.most_entries(10**6, 16, chunk=512) == 65 + 31
    assert WindowRule(512, sinks=4).most_entries(10**6, 16, chunk=512) == 32 + 65 + 31
    assert SLIDING.most_entries(100, 16, chunk=512) == 7


def test_a_window_for_layers_that_see_farther() -> None:
    assert layer_rules([None, 512]) == [FULL, SLIDING]
    assert layer_rules([None, 512, 4096], window=1024, sinks=4) == [
        WindowRule(1024, 4),
        SLIDING,
        WindowRule(1024, 4),
    ]
    assert KvGroups.of(layer_rules([None, 512], 1024, 4)).sink_span == 1028
    assert KvGroups.of(layer_rules([None, 512], 1024)).sink_span is None


def test_tokens_read_on_average() -> None:
    hybrid = KvGroups.of(rules("sssssf"))
    assert PLAIN.tokens_read(1000) == 1000
    assert hybrid.tokens_read(100) == 100
    assert hybrid.tokens_read(6512) == (5 * 512 + 6512) // 6


def test_what_fits_a_pool() -> None:
    hybrid = KvGroups.of(rules("sssssf" * 3))
    # five sliding groups of (511 + 512) / 16 + 1 blocks, and one block for each 16 tokens
    assert hybrid.most_blocks(100_000, 16, 512) == 5 * 65 + 6250
    assert hybrid.most_blocks(160, 16, 512) == 60
    assert hybrid.most_tokens(60, 16, 512, limit=100_000) == 160
    assert hybrid.most_tokens(5 * 65 + 100, 16, 512, limit=100_000) == 1600
    assert hybrid.most_tokens(10**6, 16, 512, limit=1000) == 1000
    assert hybrid.most_tokens(5, 16, 512, limit=1000) == 0
    assert PLAIN.most_tokens(10, 16, 512, limit=1000) == 160
    assert KvGroups.of(rules("ss")).most_tokens(65, 16, 512, limit=10**9) == 10**9

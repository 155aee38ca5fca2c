from __future__ import annotations

from decodefleet.worker.kv.hashing import (
    HASH_BYTES,
    extend_chain,
    group_hash,
    hash_root,
    pack_tokens,
    request_root,
    split_hashes,
    unpack_tokens,
)

ROOT = hash_root(fingerprint="f", quantization="none", block_size=4, kv_dtype="bfloat16")


def test_tokens_survive_packing() -> None:
    tokens = [0, 1, 255, 65536, 2**32 - 1]
    assert unpack_tokens(pack_tokens(tokens)) == tokens
    assert pack_tokens([1, 256]) == b"\x01\0\0\0\0\x01\0\0"


def test_only_full_blocks_are_hashed() -> None:
    assert extend_chain(ROOT, [1, 2, 3], 4) == []
    assert len(extend_chain(ROOT, list(range(11)), 4)) == 2


def test_a_chain_can_be_extended_in_parts() -> None:
    tokens = list(range(16))
    whole = extend_chain(ROOT, tokens, 4)
    assert whole == extend_chain(ROOT, tokens[:8], 4) + extend_chain(whole[1], tokens[8:], 4)
    assert split_hashes(b"".join(whole)) == whole
    assert {len(block_hash) for block_hash in whole} == {HASH_BYTES}


def test_equal_blocks_behind_different_prefixes_differ() -> None:
    first = extend_chain(ROOT, [1, 2, 3, 4, 9, 9, 9, 9], 4)
    second = extend_chain(ROOT, [4, 3, 2, 1, 9, 9, 9, 9], 4)
    assert first[1] != second[1]


def test_whatever_makes_caches_different_makes_roots_different() -> None:
    base = {"fingerprint": "f", "quantization": "none", "block_size": 4, "kv_dtype": "bfloat16"}
    changes = {"fingerprint": "g", "quantization": "int8", "block_size": 8, "kv_dtype": "fp8"}
    changes["attention"] = "window 8"
    roots = {hash_root(**base)} | {hash_root(**{**base, key: value}) for key, value in changes.items()}
    assert len(roots) == 1 + len(changes)


def test_blocks_of_other_groups_are_named_after_the_chains() -> None:
    chain = extend_chain(ROOT, list(range(8)), 4)
    names = {group_hash(block_hash, group) for block_hash in chain for group in range(3)}
    assert len(names) == 6
    assert {len(name) for name in names} == {HASH_BYTES}
    assert [group_hash(block_hash, 0) for block_hash in chain] == chain


def test_fields_do_not_run_together() -> None:
    assert request_root(ROOT, adapter="a", cache_salt="bc") != request_root(
        ROOT, adapter="ab", cache_salt="c"
    )
    assert request_root(ROOT, adapter="a") != request_root(ROOT, cache_salt="a")
    assert request_root(ROOT) == ROOT

"""Key lines: what they say, that they hide the key, and what a wrong one is told."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodefleet.cluster.access.keys import (
    Grant,
    InvalidKeyLine,
    digest_of,
    new_key,
    parse,
    parse_file,
    to_line,
)

tenants = st.text("abcXYZ019._-", min_size=1, max_size=20)
rates = st.none() | st.integers(1, 10**9).map(float)


@given(st.builds(Grant, tenant=tenants, requests_per_minute=rates, tokens_per_minute=rates,
                 max_concurrent=st.none() | st.integers(1, 1000), priority=st.integers(-1000, 1000),
                 weight=st.floats(0.01, 100), admin=st.booleans()))  # fmt: skip
def test_a_line_says_what_was_granted_and_not_the_key(grant: Grant) -> None:
    key = new_key()
    line = to_line(key, grant)
    assert key not in line
    assert parse(line) == (hashlib.sha256(key.encode()).digest(), grant)


def test_keys_are_random_and_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("df-") and len(key) >= 46 for key in keys)


def test_a_bare_key_is_a_tenant_that_may_everything() -> None:
    digest, grant = parse("secret-key")
    assert digest == digest_of("secret-key")
    assert grant == Grant(tenant=digest.hex()[:16], admin=True)


HASH = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("key tenant=a", "attributes need a hashed key"),
        ("sha256:abcd tenant=a", "64 hexadecimal digits"),
        ("sha256:" + "zz" * 32, "64 hexadecimal digits"),
        (HASH, "tenant= is missing"),
        (f"{HASH} tenant=a requests_per_minute=none", "requests_per_minute"),
        (f"{HASH} tenant=a requests_per_minute=-1", "requests_per_minute"),
        (f"{HASH} tenant=a rpm=5", "rpm"),
        (f"{HASH} tenant=a/b", "tenant"),
        (f"{HASH} tenant=a admin=perhaps", "admin"),
    ],
)
def test_a_wrong_line_is_told_what_is_wrong_and_nothing_of_what_it_holds(line: str, complaint: str) -> None:
    with pytest.raises(InvalidKeyLine, match=complaint) as caught:
        parse_file(f"# first\n\n{line}\n")
    assert str(caught.value).startswith("line 3: ")
    assert "ab" * 32 not in str(caught.value)
    assert "key tenant=a" not in str(caught.value)

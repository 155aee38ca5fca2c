"""Which keys are accepted now: files that change, break, vanish and are replaced through a link."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from decodefleet.cluster.access import key_file
from decodefleet.cluster.access.keyring import Keyring, UnusableKeys
from decodefleet.cluster.access.keys import Grant, to_line


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def line(key: str, tenant: str) -> str:
    return to_line(key, Grant(tenant=tenant)) + "\n"


def tenant(ring: Keyring, key: str) -> str | None:
    grant = ring.grant(key)
    return grant.tenant if grant is not None else None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(line("one", "a"))
    return file


def test_only_without_any_key_everybody_may_come_in(file: Path) -> None:
    assert Keyring([], None).open
    assert not Keyring(["x"], None).open
    assert not Keyring([], file).open


def test_given_keys_and_those_of_the_file_are_accepted(file: Path) -> None:
    ring = Keyring(["given"], file)
    assert tenant(ring, "one") == "a"
    assert ring.grant("given") is not None
    for wrong in ("", "On", "one ", "given\0", "\udcff", "ключ"):
        assert ring.grant(wrong) is None


def test_a_change_is_seen_after_a_second_and_not_looked_for_before(file: Path) -> None:
    clock = Clock()
    ring = Keyring([], file, clock)
    file.write_text(line("two", "b") + line("three", "c"))
    assert tenant(ring, "two") is None
    clock.now = 1.0
    assert tenant(ring, "two") == "b"
    assert tenant(ring, "one") is None


def test_a_link_that_leads_elsewhere_is_a_change(file: Path, tmp_path: Path) -> None:
    # as Kubernetes replaces what it mounts
    other, link = tmp_path / "other", tmp_path / "link"
    other.write_text(line("two", "b"))
    link.symlink_to(file)
    clock = Clock()
    ring = Keyring([], link, clock)
    (tmp_path / "new").symlink_to(other)
    os.replace(tmp_path / "new", link)
    clock.now = 2.0
    assert (tenant(ring, "one"), tenant(ring, "two")) == (None, "b")


@pytest.mark.parametrize("broken", [b"sha256:zz tenant=a\n", b"\xff\xfe", None])
def test_a_file_that_breaks_leaves_the_last_good_keys(
    file: Path, broken: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    ring = Keyring([], file, clock)
    if broken is None:
        file.unlink()
    else:
        file.write_bytes(broken)
    clock.now = 2.0
    with caplog.at_level(logging.ERROR):
        assert tenant(ring, "one") == "a"
    assert "stay in force" in caplog.text
    file.write_text(line("two", "b"))
    clock.now = 4.0
    assert (tenant(ring, "one"), tenant(ring, "two")) == (None, "b")


@pytest.mark.parametrize("content", ["", "# nothing\n", "sha256:12 tenant=a\n"])
def test_at_the_start_a_useless_file_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(UnusableKeys):
        Keyring(["given"], tmp_path / "keys")
    with pytest.raises(UnusableKeys):
        Keyring([], tmp_path / "absent")


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    first = key_file.add(file, Grant(tenant="a", requests_per_minute=60))
    second = key_file.add(file, Grant(tenant="b", admin=True))
    third = key_file.add(file, Grant(tenant="b"))
    assert file.stat().st_mode & 0o077 == 0
    assert [grant.tenant for _, grant in key_file.entries(file)] == ["a", "b", "b"]
    assert not any(key in file.read_text() for key in (first, second, third))
    assert key_file.revoke(file, "nobody") == 0
    assert key_file.revoke(file, f"sha256:{key_file.entries(file)[0][0].hex()[:7]}") == 0
    assert key_file.revoke(file, first) == 1
    assert key_file.revoke(file, key_file.entries(file)[0][0].hex()[:8]) == 1
    assert tenant(Keyring([], file), third) == "b"
    assert key_file.revoke(file, "b") == 1
    assert list(tmp_path.iterdir()) == [file]


def test_comments_outlive_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the search team\n" + line("one", "a"))
    key_file.add(file, Grant(tenant="b"))
    key_file.revoke(file, "a")
    assert file.read_text().startswith("# of the search team\nsha256:")


def test_who_was_revoked_last_stays_out(file: Path) -> None:
    clock = Clock()
    ring = Keyring([], file, clock)
    assert key_file.revoke(file, "a") == 1
    clock.now = 2.0
    assert tenant(ring, "one") is None
    assert not ring.open

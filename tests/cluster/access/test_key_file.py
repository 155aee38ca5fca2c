"""What becomes of the file itself when keys are added and revoked."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from decodefleet.cluster.access import key_file
from decodefleet.cluster.access.keyring import UnusableKeys
from decodefleet.cluster.access.keys import Grant

GRANT = Grant(tenant="t")


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_a_new_file_is_its_owners_only(tmp_path: Path) -> None:
    key_file.add(tmp_path / "keys", GRANT)
    assert mode(tmp_path / "keys") == 0o600


@pytest.mark.parametrize("given", [0o640, 0o644, 0o400])
def test_the_mode_stays(tmp_path: Path, given: int) -> None:
    file = tmp_path / "keys"
    key_file.add(file, GRANT)
    file.chmod(given)
    key_file.add(file, Grant(tenant="other"))
    assert mode(file) == given
    assert key_file.revoke(file, "t") == 1
    assert mode(file) == given


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root gives files away")
def test_the_owner_stays(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key_file.add(file, GRANT)
    os.chown(file, 1234, 4321)
    key_file.add(file, Grant(tenant="other"))
    assert (file.stat().st_uid, file.stat().st_gid) == (1234, 4321)


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    real, link = tmp_path / "secrets" / "keys", tmp_path / "keys"
    link.symlink_to(real)
    for tenant in ("first", "second"):
        key_file.add(link, Grant(tenant=tenant))
        assert link.is_symlink()
        assert not real.is_symlink()
    assert [grant.tenant for _, grant in key_file.entries(real)] == ["first", "second"]
    # nothing is left of the writing
    assert sorted(tmp_path.rglob("*")) == sorted([link, real.parent, real])


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnusableKeys, match="cannot write"):
        key_file.add(tmp_path / "absent" / "keys", GRANT)

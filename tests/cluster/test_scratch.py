"""Folders that go with their owner, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from decodefleet.cluster.scratch import ScratchFolder


def age(folder: Path) -> None:
    os.utime(folder, (0, 0))


def test_its_owner_alone_can_read_it_and_takes_it_away(tmp_path):
    folder = ScratchFolder("some-", tmp_path)
    assert folder.path.parent == tmp_path
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert not [*tmp_path.iterdir()]


def test_of_an_owner_that_was_killed_is_swept_up_by_the_next(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from decodefleet.cluster.scratch import ScratchFolder\n"
        "folder = ScratchFolder('some-', Path(sys.argv[1])); print(folder.path, flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        age(left)
        # in use
        ScratchFolder("some-", tmp_path).close()
        assert left.exists()
        owner.kill()
    other = tmp_path / "other-1"
    other.mkdir()
    age(other)
    # young: it might be in the making
    os.utime(left)
    ScratchFolder("some-", tmp_path).close()
    assert left.exists()
    age(left)
    ScratchFolder("some-", tmp_path).close()
    assert not left.exists()
    assert other.exists()


def test_sockets_fit_where_paths_are_long(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = ScratchFolder("decodefleet-test-")
    assert len(str(folder.path)) < 80
    folder.close()

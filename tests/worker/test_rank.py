"""The entry point of a rank process; what it serves is tested where it is served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def test_a_rank_whose_parent_is_gone_already_ends_at_once(tmp_path: Path) -> None:
    # not ours to be the child of: as seen by a rank whose parent died before it could ask to die with it
    other = str(os.getppid())
    command = [sys.executable, "-m", "decodefleet.worker.rank", "--config", str(tmp_path), "--parent", other]
    assert subprocess.run(command).returncode == -signal.SIGKILL


def test_a_rank_whose_parent_lives_goes_on(tmp_path: Path) -> None:
    own = str(os.getpid())
    command = [sys.executable, "-m", "decodefleet.worker.rank", "--config", str(tmp_path), "--parent", own]
    ended = subprocess.run(command, capture_output=True, text=True)
    # as far as to the configuration, which is a folder here
    assert "IsADirectoryError" in ended.stderr

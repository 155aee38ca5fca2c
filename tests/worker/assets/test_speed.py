from __future__ import annotations

from pathlib import Path

import pytest

from decodefleet.worker.assets.speed import disk_bytes_per_s, memory_bytes_per_s


def test_memory_and_disk_have_a_speed(tmp_path: Path) -> None:
    assert memory_bytes_per_s() > 1e6
    assert disk_bytes_per_s(tmp_path) > 1e3
    assert [*tmp_path.iterdir()] == [], "nothing is left behind"


def test_a_folder_that_is_still_to_be_made_has_its_parents_speed(tmp_path: Path) -> None:
    assert disk_bytes_per_s(tmp_path / "a" / "b") > 1e3
    assert [*tmp_path.iterdir()] == []


def test_a_folder_in_which_no_file_can_be_made_is_an_error() -> None:
    with pytest.raises(OSError):
        disk_bytes_per_s(Path("/proc/self/kv"))

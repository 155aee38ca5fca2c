"""The slab file on a real disk: what survives, what is refused, what is found to be damaged."""

from __future__ import annotations

import json
import logging
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from decodefleet.worker.kv.tiers.slab_file import PAGE, SlabFile, SlabForm, open_slab_file
from decodefleet.worker.kv.tiers.slots import Entry

FORM = SlabForm(root="ab" * 16, slab_bytes=5000, slots=8)


def name(i: int) -> bytes:
    return bytes([i]) * 16


def slab(i: int) -> bytes:
    return bytes([i, 255 - i]) * (FORM.slab_bytes // 2)


def pages(data: bytes = b"") -> memoryview:
    memory = memoryview(mmap.mmap(-1, FORM.stride))
    memory[: len(data)] = data
    return memory


def write(file: SlabFile, slot: int, i: int, *, silent: bool = False) -> Entry:
    entry = Entry(name(i), slot, silent)
    file.write(entry, pages(slab(i)))
    return entry


def read(file: SlabFile, entry: Entry) -> bytes | None:
    """What the file says the block is; None for a miss."""
    buffer = pages()
    return bytes(buffer[: FORM.slab_bytes]) if file.read(entry, buffer) else None


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = open_slab_file(tmp_path / "deep" / "er", FORM)
    entries = [write(file, slot, slot + 1) for slot in range(FORM.slots)]
    assert [read(file, entry) for entry in entries] == [slab(slot + 1) for slot in range(FORM.slots)]
    assert file.path.stat().st_size == FORM.file_bytes
    assert file.path.stat().st_mode & 0o77 == 0, "what users wrote is nobody else's"
    file.close()


def test_the_index_is_found_again_oldest_first(tmp_path: Path) -> None:
    file = open_slab_file(tmp_path, FORM)
    for slot, i in ((3, 1), (0, 2), (5, 3), (3, 4)):
        write(file, slot, i, silent=i == 2)
    file.close()
    again = open_slab_file(tmp_path, FORM)
    found = again.load_index()
    assert [(entry.name, entry.slot, entry.silent) for entry in found] == [
        (name(2), 0, True),
        (name(3), 5, False),
        (name(4), 3, False),
    ]
    assert [read(again, entry) for entry in found] == [slab(2), slab(3), slab(4)]
    again.close()


def test_blocks_of_a_killed_process_are_found_and_half_written_ones_are_not(tmp_path: Path) -> None:
    script = f"""
import mmap, os
from pathlib import Path
from decodefleet.worker.kv.tiers import slab_file
from decodefleet.worker.kv.tiers.slots import Entry
file = slab_file.open_slab_file(Path({str(tmp_path)!r}), slab_file.{FORM!r})
buffer = memoryview(mmap.mmap(-1, file.form.stride))
for i in (1, 2, 3):
    buffer[:5000] = bytes([i, 255 - i]) * 2500
    file.write(Entry(bytes([i]) * 16, i), buffer)
# the next write dies after its slab, before its record
whole = slab_file._pwrite
def dying(fd, data, offset):
    if len(data) == slab_file.RECORD.size:
        os.kill(os.getpid(), 9)
    whole(fd, data, offset)
slab_file._pwrite = dying
file.write(Entry(bytes([4]) * 16, 2), buffer)
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    file = open_slab_file(tmp_path, FORM)
    found = file.load_index()
    assert [(entry.name, entry.slot) for entry in found] == [(name(1), 1), (name(3), 3)]
    assert [read(file, entry) for entry in found] == [slab(1), slab(3)]
    file.close()


def test_a_record_that_reached_the_disk_before_its_slab_is_a_miss(tmp_path: Path) -> None:
    file = open_slab_file(tmp_path, FORM)
    write(file, 0, 1)
    newer = write(file, 0, 2)
    offset = FORM.slabs_start
    # a power failure: the record is the new one, half of the slab the old one
    with file.path.open("r+b") as raw:
        raw.seek(offset + FORM.slab_bytes // 2)
        raw.write(slab(1)[: FORM.slab_bytes // 2])
    assert read(file, newer) is None
    file.close()


@pytest.mark.parametrize("where", [0, 2500, 4999])
def test_a_flipped_bit_is_found(tmp_path: Path, where: int) -> None:
    file = open_slab_file(tmp_path, FORM)
    entry = write(file, 1, 1)
    with file.path.open("r+b") as raw:
        raw.seek(FORM.slabs_start + FORM.stride + where)
        (byte,) = raw.read(1)
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte ^ 0x10]))
    assert read(file, entry) is None
    file.close()


def test_a_block_read_under_another_name_is_a_miss(tmp_path: Path) -> None:
    file = open_slab_file(tmp_path, FORM)
    write(file, 1, 1)
    assert read(file, Entry(name(2), 1)) is None
    file.close()


def test_two_workers_use_two_files_and_find_them_again(tmp_path: Path) -> None:
    first, second = (open_slab_file(tmp_path, FORM) for _ in range(2))
    assert first.path != second.path
    write(first, 0, 1)
    write(second, 0, 2)
    first.close()
    second.close()
    again = [open_slab_file(tmp_path, FORM) for _ in range(2)]
    assert {entry.name for file in again for entry in file.load_index()} == {name(1), name(2)}
    for file in again:
        file.close()


@pytest.mark.parametrize(
    "other",
    [
        replace(FORM, root="cd" * 16),
        replace(FORM, slab_bytes=4096),
        replace(FORM, slots=4),
        replace(FORM, tp_size=2),
        replace(FORM, rank=1),
    ],
)
def test_a_file_of_another_form_is_made_anew_and_not_read(
    tmp_path: Path, other: SlabForm, caplog: pytest.LogCaptureFixture
) -> None:
    file = open_slab_file(tmp_path, FORM)
    write(file, 0, 1)
    file.close()
    changed = open_slab_file(tmp_path, other)
    assert changed.path == file.path, "one worker needs no second file"
    assert changed.load_index() == []
    assert "made anew" in caplog.text
    changed.close()


def test_a_worker_prefers_its_own_file_to_another_models(tmp_path: Path) -> None:
    theirs, own = open_slab_file(tmp_path, replace(FORM, root="cd" * 16)), open_slab_file(tmp_path, FORM)
    write(own, 0, 1)
    theirs.close()
    own.close()
    again = open_slab_file(tmp_path, FORM)
    assert again.path == own.path
    assert len(again.load_index()) == 1
    again.close()


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "no json", "list"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    file = open_slab_file(tmp_path, FORM)
    write(file, 0, 1)
    file.close()
    if damage == "truncated":
        os.truncate(file.path, FORM.slabs_start + FORM.stride)
    elif damage == "empty":
        os.truncate(file.path, 0)
    else:
        block = {"garbage": os.urandom(PAGE), "no json": b"x" * PAGE, "list": b"[1]".ljust(PAGE, b"\0")}[
            damage
        ]
        with file.path.open("r+b") as raw:
            raw.write(block)
    again = open_slab_file(tmp_path, FORM)
    assert again.load_index() == []
    assert read(again, write(again, 0, 2)) == slab(2)
    again.close()


def test_clearing_outlasts_a_restart(tmp_path: Path) -> None:
    file = open_slab_file(tmp_path, FORM)
    write(file, 0, 1)
    file.clear()
    write(file, 1, 2)
    file.close()
    again = open_slab_file(tmp_path, FORM)
    assert [entry.name for entry in again.load_index()] == [name(2)]
    again.close()


def test_the_superblock_can_be_read_by_people(tmp_path: Path) -> None:
    file = open_slab_file(tmp_path, FORM)
    first = file.path.read_bytes().split(b"\n", 1)[0]
    assert json.loads(first)["root"] == FORM.root
    file.close()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond: writing there fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_room_is_an_error_and_keeps_nothing(tmp_path: Path) -> None:
    with file_size_limit(FORM.file_bytes - 1), pytest.raises(OSError):
        open_slab_file(tmp_path, FORM)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]
    file = open_slab_file(tmp_path, FORM)
    assert file.load_index() == []
    file.close()


@pytest.mark.parametrize("folder", ["/proc/decodefleet", "/dev/null/kv"])
def test_a_folder_that_cannot_be_had_is_an_error(folder: str) -> None:
    with pytest.raises(OSError):
        open_slab_file(Path(folder), FORM)


def test_a_file_that_ends_early_is_an_error_not_a_block(tmp_path: Path) -> None:
    file = open_slab_file(tmp_path, FORM)
    entry = write(file, 5, 1)
    os.truncate(file.path, FORM.slabs_start + FORM.stride)
    with pytest.raises(OSError):
        file.read(entry, pages())
    file.close()


def test_a_write_that_fails_leaves_no_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = open_slab_file(tmp_path, FORM)
    write(file, 7, 1)
    with file_size_limit(FORM.slabs_start), pytest.raises(OSError):
        write(file, 7, 2)
    file.close()
    caplog.set_level(logging.WARNING)
    again = open_slab_file(tmp_path, FORM)
    assert again.load_index() == []
    assert not caplog.records
    again.close()

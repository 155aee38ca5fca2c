"""The slab file of the NVMe tier: where bytes lie, how they survive a crash, whose the file is. Torch-free.

    superblock   one page: what the file is for, as a line of JSON
    records      one of 64 bytes per slot: magic, checksum, generation, sequence, name, silence
    slabs        one per slot, whole pages
    probe        as many slabs as a start-up measurement writes

A slot is written in the order: record away, slab, record. What a killed process had begun is therefore no
record at all. What a power failure reordered is caught by the checksum (CRC-32 over name and slab), which is
checked at every read: a torn or rotten block is missing, never wrong. Clearing the file is a new generation.
The file is locked by one process; another one takes the next file of the same folder. With several ranks the
files of one number belong together: rank 0 finds the number, the others follow. Not thread-safe but for
reads, which may run beside each other and beside one write.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import mmap
import os
import struct
import zlib
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .slots import Entry

PAGE = 4096
FORMAT = 1
MAGIC = b"dfkv"
RECORD = struct.Struct("<4sIQQ16s?")
RECORD_BYTES = 64
MOST_FILES = 64
PROBE_SLABS = 8

_RECORDS = np.dtype(
    {
        "names": ["magic", "checksum", "generation", "sequence", "name", "silent"],
        "formats": ["S4", "<u4", "<u8", "<u8", "V16", "?"],
        "offsets": [0, 4, 8, 16, 24, 40],
        "itemsize": RECORD_BYTES,
    }
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlabForm:
    """What makes two files interchangeable.

    root: hash that names model content, dtype, layout and block size. slab_bytes: of one block.
    """

    root: str
    slab_bytes: int
    slots: int
    tp_size: int = 1
    rank: int = 0

    @property
    def stride(self) -> int:
        return -(-self.slab_bytes // PAGE) * PAGE

    @property
    def slabs_start(self) -> int:
        return PAGE + -(-self.slots * RECORD_BYTES // PAGE) * PAGE

    @property
    def file_bytes(self) -> int:
        return self.slabs_start + (self.slots + PROBE_SLABS) * self.stride


class SlabFile:
    """An open, locked file. Buffers: `stride` bytes, page-aligned. Methods raise OSError where I/O fails."""

    def __init__(self, path: Path, form: SlabForm, fd: int, *, generation: int) -> None:
        self.path = path
        self.form = form
        self._fd = fd
        self._generation = generation
        self._sequence = 0
        self._checksums = array("I", bytes(4 * form.slots))
        self._direct = _open_direct(path, form)

    @property
    def number(self) -> int:
        """Of the file in its folder."""
        return int(self.path.name[3:5])

    @property
    def direct(self) -> bool:
        """Whether slabs bypass the page cache."""
        return self._direct is not None

    def load_index(self) -> list[Entry]:
        """All blocks that were written whole, oldest first."""
        index = _read_index(self._fd, self.form, self._generation)
        for entry, checksum in zip(index.entries, index.checksums, strict=True):
            self._checksums[entry.slot] = checksum
        self._sequence = index.next
        return index.entries

    def write(self, entry: Entry, slab: memoryview) -> None:
        name, offset = entry.name, PAGE + entry.slot * RECORD_BYTES
        _pwrite(self._fd, bytes(RECORD_BYTES), offset)
        checksum = self._checksum(name, slab)
        _pwrite(self._slab_fd, slab, self._offset(entry.slot))
        self._checksums[entry.slot] = checksum
        record = RECORD.pack(MAGIC, checksum, self._generation, self._sequence, name, entry.silent)
        _pwrite(self._fd, record, offset)
        self._sequence += 1

    def read(self, entry: Entry, slab: memoryview) -> bool:
        """Fills `slab`; False where the bytes are not those that were written under this name."""
        _preadinto(self._slab_fd, slab, self._offset(entry.slot))
        return self._checksum(entry.name, slab) == self._checksums[entry.slot]

    def probe(self, index: int, slab: memoryview, *, write: bool) -> None:
        """Moves one slab to or from the measuring area."""
        offset = self._offset(self.form.slots + index)
        if write:
            _pwrite(self._slab_fd, slab, offset)
        else:
            _preadinto(self._slab_fd, slab, offset)

    def clear(self) -> None:
        """Forget all blocks."""
        self._generation += 1
        _write_superblock(self._fd, self.form, self._generation)

    def close(self) -> None:
        for fd in {self._fd, self._slab_fd}:
            os.close(fd)

    @property
    def _slab_fd(self) -> int:
        return self._fd if self._direct is None else self._direct

    def _offset(self, slot: int) -> int:
        return self.form.slabs_start + slot * self.form.stride

    def _checksum(self, name: bytes, slab: memoryview) -> int:
        return zlib.crc32(slab[: self.form.slab_bytes], zlib.crc32(name))


def open_slab_file(folder: Path, form: SlabForm, number: int | None = None) -> SlabFile:
    """A file of this form in `folder`: one that has blocks already if there is one, else a new or reused one.

    number: that rank 0 has; for other ranks only. Raises OSError where the folder or the file cannot be had,
    or the disk has no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if number is not None:
        path = rank_path(folder, number, form.rank)
        fd = _lock(path)
        if fd is None:
            raise OSError(errno.EBUSY, "another process has the rank's slab file", str(path))
        found = _generation(fd, form)
        return SlabFile(path, form, fd, generation=_format(path, fd, form) if found is None else found)
    for path in sorted(folder.glob("kv-[0-9][0-9].slab")):
        fd = _lock(path)
        if fd is None:
            continue
        generation = _generation(fd, form)
        if generation is not None:
            return SlabFile(path, form, fd, generation=generation)
        os.close(fd)
    for number in range(MOST_FILES):
        path = rank_path(folder, number, 0)
        fd = _lock(path)
        if fd is not None:
            # of a gang whose rank 0 had this file
            for other in folder.glob(f"{path.stem}.rank*.slab"):
                other.unlink()
            return SlabFile(path, form, fd, generation=_format(path, fd, form))
    raise OSError(errno.EBUSY, f"all {MOST_FILES} slab files are in use", str(folder))


def rank_path(folder: Path, number: int, rank: int) -> Path:
    return folder / (f"kv-{number:02}.rank{rank}.slab" if rank else f"kv-{number:02}.slab")


def stored_slots(path: Path, form: SlabForm) -> dict[bytes, int]:
    """Slots of all blocks in a file of another process, by name; to be asked while nothing is written."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        generation = _generation(fd, form)
        entries = [] if generation is None else _read_index(fd, form, generation).entries
    finally:
        os.close(fd)
    return {entry.name: entry.slot for entry in entries}


class _Index(NamedTuple):
    """Entries oldest first, their checksums, and the number of the next write."""

    entries: list[Entry]
    checksums: list[int]
    next: int


def _read_index(fd: int, form: SlabForm, generation: int) -> _Index:
    raw = _pread(fd, form.slots * RECORD_BYTES, PAGE)
    records = np.frombuffer(raw, dtype=_RECORDS)
    valid = (records["magic"] == MAGIC) & (records["generation"] == generation)
    (slots,) = np.nonzero(valid)
    slots = slots[np.argsort(records["sequence"][slots], kind="stable")]
    # a name that was written twice counts where it was written last
    newest = {bytes(records["name"][slot]): int(slot) for slot in slots}
    entries = [Entry(name, slot, bool(records["silent"][slot]), filled=True) for name, slot in newest.items()]
    checksums = [int(records["checksum"][entry.slot]) for entry in entries]
    return _Index(entries, checksums, int(records["sequence"][slots[-1]]) + 1 if len(slots) else 0)


def _lock(path: Path) -> int | None:
    """The open file, ours alone until it is closed or the process ends; None if it is another's."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return fd


def _generation(fd: int, form: SlabForm) -> int | None:
    """Of a whole file of this form; None for any other."""
    try:
        superblock = json.loads(_pread(fd, PAGE, 0).rstrip(b"\0"))
    except (OSError, ValueError):
        return None
    generation = superblock.pop("generation", None) if isinstance(superblock, dict) else None
    whole = os.fstat(fd).st_size >= form.file_bytes
    ours = whole and superblock == {"format": FORMAT, **asdict(form)}
    return generation if ours and isinstance(generation, int) else None


def _format(path: Path, fd: int, form: SlabForm) -> int:
    """Returns the generation."""
    if os.fstat(fd).st_size:
        log.warning("%s is of another model, form or size, or damaged: it is made anew", path)
    try:
        os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, form.file_bytes)
        _write_superblock(fd, form, generation=1)
    except OSError:
        # what little there was on a full disk is not kept from others
        os.ftruncate(fd, 0)
        os.close(fd)
        raise
    return 1


def _write_superblock(fd: int, form: SlabForm, generation: int) -> None:
    line = json.dumps({"format": FORMAT, "generation": generation, **asdict(form)}).encode() + b"\n"
    _pwrite(fd, line.ljust(PAGE, b"\0"), 0)


def _open_direct(path: Path, form: SlabForm) -> int | None:
    """Not every filesystem has O_DIRECT, and some that do refuse it at the first transfer only."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, PAGE) as memory, memoryview(memory) as page:
            _preadinto(fd, page, form.slabs_start)
    except OSError:
        os.close(fd)
        return None
    return fd


def _pread(fd: int, size: int, offset: int) -> bytes:
    data = bytearray(size)
    _preadinto(fd, memoryview(data), offset)
    return bytes(data)


def _preadinto(fd: int, buffer: memoryview, offset: int) -> None:
    while buffer:
        count = os.preadv(fd, [buffer], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file ends early")
        buffer, offset = buffer[count:], offset + count


def _pwrite(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count

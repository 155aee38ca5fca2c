"""A rank's store, from sizes: memory, slab file and threads; the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from .copies import Copies
from .host_memory import HostMemory
from .slab_file import PROBE_SLABS, SlabForm, open_slab_file
from .store import Disk, Store

MOST_READERS = 4

Threads = Callable[[int], Executor]


def open_store(
    copies: Copies, host_slots: int, disk: Disk | None, threads: Threads = ThreadPoolExecutor
) -> Store:
    """Raises OSError where the host memory cannot be had."""
    memory = HostMemory(host_slots, copies.slab_bytes, copies.device)
    return Store(copies, memory, threads(1), threads(1), disk)


def open_disk(
    folder: Path,
    form: SlabForm,
    copies: Copies,
    number: int | None = None,
    threads: Threads = ThreadPoolExecutor,
) -> Disk:
    """As `open_slab_file`; and the disk was written to."""
    file = open_slab_file(folder, form, number)
    try:
        buffers = HostMemory(PROBE_SLABS, form.slab_bytes, copies.device)
        for index in range(PROBE_SLABS):
            file.probe(index, buffers.pages(index), write=True)
    except OSError:
        file.close()
        raise
    readers = min(MOST_READERS, os.cpu_count() or 1)
    return Disk(file, buffers, readers, threads(readers), threads(1))

"""From options to working tiers: memory, slab file, threads, and what their links are worth.

A tier that cannot be had is said so once and left out; the worker serves without it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from ...config import CacheConfig
from ...protocol import EventSink
from ..block_pool import BlockPool
from .copies import Copies
from .cost import Link
from .host_memory import HostMemory
from .jobs import Jobs
from .loader import Loader, from_file, from_memory
from .saver import Saver
from .slab_file import PROBE_SLABS, SlabFile, SlabForm, open_slab_file
from .slots import Slots
from .tier import Tier
from .tiers import KvTiers
from .writer import Writer

log = logging.getLogger(__name__)

GIB = 1 << 30
# host slots through which blocks go to disk where there is no CPU tier
STAGE_SLOTS = 64
# so few are overrun by a burst faster than the disk can take them
FEW_SLOTS = 256
MOST_READERS = 4
PROBE_TRIES = 3


def open_tiers(
    cache: CacheConfig,
    slabs: Tensor,
    pool: BlockPool,
    sink: EventSink,
    root: bytes,
    threads: Callable[[int], Executor] = ThreadPoolExecutor,
) -> KvTiers | None:
    """slabs: the main pool, uint8 [blocks, slab_bytes], not in use yet. root: of the chains of block hashes.

    None where no tier is asked for, or none can be had.
    """
    copies, slab_bytes = Copies(slabs), slabs.shape[1]
    disk = None
    if cache.nvme_kv_path is not None:
        form = SlabForm(root.hex(), slab_bytes, int(cache.nvme_kv_gib * GIB) // slab_bytes)
        disk = _open_disk(cache.nvme_kv_path, form, copies, sink, threads)
    slots = int(cache.cpu_kv_gib * GIB) // slab_bytes
    if not slots and disk is None:
        return None
    host = _open_host(slots, copies, sink, disk, threads)
    jobs = Jobs()
    writer = None
    sources = {host.tier: from_memory(copies, host.memory, host.load)}
    if disk is not None:
        sources[disk.tier] = from_file(copies, disk.file, disk.buffers, disk.readers, disk.read)
        writer = Writer(
            host.memory, disk.file, host.tier, disk.tier, jobs, disk.write, hold=slots < FEW_SLOTS
        )
    saver = Saver(pool, copies, host.memory, host.tier, jobs, host.save, writer)
    # what comes from disk is worth a place in memory as well, if that is more than a stage
    on_arrival = saver.offer if slots else None
    return KvTiers(
        [*sources],
        saver,
        Loader(pool, copies, jobs, sources, on_arrival),
        jobs,
        slab_bytes=slab_bytes,
        policy=cache.kv_restore,
        staged=not slots,
        clear_file=disk.file.clear if disk is not None else None,
        close=partial(_close, host, disk),
    )


@dataclass(frozen=True)
class _Host:
    tier: Tier
    memory: HostMemory
    save: Executor
    load: Executor


@dataclass(frozen=True)
class _Disk:
    """buffers: in host memory, one for each of `readers` threads, at least."""

    tier: Tier
    file: SlabFile
    buffers: HostMemory
    readers: int
    read: Executor
    write: Executor


def _open_host(
    slots: int, copies: Copies, sink: EventSink, disk: _Disk | None, threads: Callable[[int], Executor]
) -> _Host:
    """A tier of its own, or with 0 slots a stage on the way to disk, of which nobody is told."""
    told, slots = (sink, slots) if slots else (None, STAGE_SLOTS)
    memory = HostMemory(slots, copies.slab_bytes, copies.device)
    save, load = threads(1), threads(1)
    link = _measure(partial(_load_block, copies, memory, slots), copies.slab_bytes, load)
    tier = Tier("cpu", Slots(slots), link, told, below=None if disk is None else disk.tier)
    if told is not None:
        log.info("cpu tier of the KV cache: %s", _description(tier, copies.slab_bytes))
    return _Host(tier, memory, save, load)


def _open_disk(
    folder: Path, form: SlabForm, copies: Copies, sink: EventSink, threads: Callable[[int], Executor]
) -> _Disk | None:
    readers = min(MOST_READERS, os.cpu_count() or 1)
    read, write = threads(readers), threads(1)
    buffers = HostMemory(PROBE_SLABS, form.slab_bytes, copies.device)
    file = None
    try:
        file = open_slab_file(folder, form)
        for index in range(PROBE_SLABS):
            file.probe(index, buffers.pages(index), write=True)
        link = _measure(partial(_read_block, copies, file, buffers), form.slab_bytes, read)
        tier = Tier("nvme", Slots(form.slots), link, sink)
        tier.adopt(file.load_index())
    except OSError as error:
        log.warning("the nvme tier of the KV cache is left out: %s", error)
        if file is not None:
            file.close()
        return None
    log.info(
        "nvme tier of the KV cache: %s%s, %d blocks from before; %s",
        file.path,
        "" if file.direct else " (buffered: the filesystem has no O_DIRECT)",
        len(tier.slots),
        _description(tier, form.slab_bytes),
    )
    return _Disk(tier, file, buffers, readers, read, write)


def _close(host: _Host, disk: _Disk | None) -> None:
    for executor in (host.save, host.load, *((disk.read, disk.write) if disk is not None else ())):
        executor.shutdown(cancel_futures=True)
    host.memory.close()
    if disk is not None:
        disk.buffers.close()
        disk.file.close()


def _measure(move: Callable[[int], None], size: int, executor: Executor) -> Link:
    """What one block of `size` bytes takes, and several at once; each the best of a few tries."""

    def seconds(count: int) -> float:
        began = time.perf_counter()
        for future in [executor.submit(move, index) for index in range(count)]:
            future.result()
        return time.perf_counter() - began

    one, many = (min(seconds(count) for _ in range(PROBE_TRIES)) for count in (1, PROBE_SLABS))
    return Link.measured(one, many, size, PROBE_SLABS)


def _load_block(copies: Copies, memory: HostMemory, slots: int, index: int) -> None:
    copies.load([(index % copies.blocks, memory.slab(index % slots))], None)


def _read_block(copies: Copies, file: SlabFile, buffers: HostMemory, index: int) -> None:
    file.probe(index, buffers.pages(index), write=False)
    _load_block(copies, buffers, PROBE_SLABS, index)


def _description(tier: Tier, slab_bytes: int) -> str:
    gib = tier.slots.total * slab_bytes / GIB
    speed = f"{tier.link.bytes_per_s / 1e9:.1f} GB/s after {tier.link.latency_s * 1e6:.0f} µs"
    return f"{tier.slots.total} blocks in {gib:.1f} GiB, back at {speed}"

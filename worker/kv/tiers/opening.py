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
MOST_READERS = 4
PROBE_TRIES = 3


def open_tiers(
    cache: CacheConfig, slabs: Tensor, pool: BlockPool, sink: EventSink, root: bytes
) -> KvTiers | None:
    """slabs: the main pool, uint8 [blocks, slab_bytes], not in use yet. root: of the chains of block hashes.

    None where no tier is asked for, or none can be had.
    """
    copies, slab_bytes = Copies(slabs), slabs.shape[1]
    disk = None
    if cache.nvme_kv_path is not None:
        form = SlabForm(root.hex(), slab_bytes, int(cache.nvme_kv_gib * GIB) // slab_bytes)
        disk = _open_disk(cache.nvme_kv_path, form, copies, sink)
    cpu_slots = int(cache.cpu_kv_gib * GIB) // slab_bytes
    staged = not cpu_slots
    if staged and disk is None:
        return None
    slots = cpu_slots or STAGE_SLOTS
    memory = HostMemory(slots, slab_bytes, copies.device)
    save, load, jobs = _threads("kv-save", 1), _threads("kv-load", 1), Jobs()
    link = _measure(partial(_load_block, copies, memory, slots), slab_bytes, load)
    cpu = Tier("cpu", Slots(slots), link, None if staged else sink, disk.tier if disk else None)
    log.info("cpu tier of the KV cache: %s", _description(cpu, slab_bytes))
    tiers, sources, writer = [cpu], {cpu: from_memory(copies, memory, load)}, None
    if disk is not None:
        tiers.append(disk.tier)
        sources[disk.tier] = from_file(copies, disk.file, disk.buffers, disk.readers, disk.read)
        writer = Writer(memory, disk.file, cpu, disk.tier, jobs, disk.write, stage=staged)

    def close() -> None:
        for executor in (save, load, *((disk.read, disk.write) if disk else ())):
            executor.shutdown(cancel_futures=True)
        memory.close()
        if disk is not None:
            disk.close()

    saver = Saver(pool, copies, memory, cpu, jobs, save, writer)
    # what comes from disk is worth a place in memory as well, if that is more than a stage
    on_arrival = saver.offer if not staged else lambda name, silent: None
    return KvTiers(
        tiers,
        saver,
        Loader(pool, copies, jobs, sources, on_arrival),
        jobs,
        slab_bytes=slab_bytes,
        policy=cache.kv_restore,
        clear_file=disk.file.clear if disk else lambda: None,
        close=close,
        staged=staged,
    )


@dataclass(frozen=True)
class _Disk:
    """buffers: in host memory, one for each of `readers` threads."""

    file: SlabFile
    tier: Tier
    buffers: HostMemory
    readers: int
    read: Executor
    write: Executor

    def close(self) -> None:
        self.buffers.close()
        self.file.close()


def _open_disk(folder: Path, form: SlabForm, copies: Copies, sink: EventSink) -> _Disk | None:
    readers = min(MOST_READERS, os.cpu_count() or 1)
    try:
        file = open_slab_file(folder, form)
        buffers = HostMemory(PROBE_SLABS, form.slab_bytes, copies.device)
        read, write = _threads("kv-read", readers), _threads("kv-write", 1)
        for index in range(PROBE_SLABS):
            file.probe(index, buffers.pages(index), write=True)
        link = _measure(partial(_read_block, copies, file, buffers), form.slab_bytes, read)
        tier = Tier("nvme", Slots(form.slots), link, sink)
        tier.adopt(file.load_index())
    except OSError as error:
        log.warning("the nvme tier of the KV cache is left out: %s", error)
        return None
    log.info(
        "nvme tier of the KV cache: %s%s, %d blocks from before; %s",
        file.path,
        "" if file.direct else " (buffered: the filesystem has no O_DIRECT)",
        len(tier.slots),
        _description(tier, form.slab_bytes),
    )
    return _Disk(file, tier, buffers, readers, read, write)


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


def _threads(name: str, count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=name)


def _description(tier: Tier, slab_bytes: int) -> str:
    gib = tier.slots.total * slab_bytes / GIB
    speed = f"{tier.link.bytes_per_s / 1e9:.1f} GB/s after {tier.link.latency_s * 1e6:.0f} µs"
    return f"{tier.slots.total} blocks in {gib:.1f} GiB, back at {speed}"

"""From options to working tiers: stores on all ranks, and what the links to them are worth.

A tier that cannot be had is said so once and left out; the worker serves without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ...config import CacheConfig
from ...protocol import EventSink
from ..block_pool import BlockPool
from .copies import Copies
from .cost import Link
from .loader import Loader
from .neighbours import MakeNeighbours
from .saver import Saver
from .slab_file import PROBE_SLABS, SlabForm, rank_path, stored_slots
from .slots import Entry, Slots
from .store import Disk, Kind, Outcome, Piece, Store
from .store_opening import Threads, open_disk, open_store
from .tier import Tier
from .tiers import KvTiers
from .transfers import Others, Transfers
from .writer import Writer

log = logging.getLogger(__name__)

GIB = 1 << 30
# host slots through which blocks go to disk where there is no CPU tier
STAGE_SLOTS = 64
# so few are overrun by a burst faster than the disk can take them
FEW_SLOTS = 256
PROBE_TRIES = 3


class OtherStores(Others, Protocol):
    """Those of the other ranks, which have none yet."""

    def open(self, host_slots: int, form: SlabForm | None, number: int) -> str | None:
        """As rank 0 has them; form and number: of its file. Returns why one of them cannot have a file.

        Raises RankLost.
        """

    def close_disk(self) -> None:
        """Those that have a file do without it from now on."""


@dataclass(frozen=True)
class _Sizes:
    """Slots of each rank, in host memory and on disk."""

    host: int
    disk: int

    @property
    def host_slots(self) -> int:
        """With no host memory of its own, disk has a stage there; without either a slot is enough."""
        return self.host or (STAGE_SLOTS if self.disk else 1)

    @staticmethod
    def of(cache: CacheConfig, slab_bytes: int, ranks: int) -> _Sizes:
        disk = cache.nvme_kv_gib if cache.nvme_kv_path is not None else 0.0
        return _Sizes(*(int(gib * GIB) // (slab_bytes * ranks) for gib in (cache.cpu_kv_gib, disk)))


def open_tiers(
    cache: CacheConfig,
    slabs: Tensor,
    pool: BlockPool,
    sink: EventSink,
    root: bytes,
    others: OtherStores | None = None,
    threads: Threads = ThreadPoolExecutor,
    make_peers: MakeNeighbours | None = None,
) -> KvTiers | None:
    """slabs: the main pool, uint8 [blocks, slab_bytes], not in use yet. root: of the chains of block hashes.
    make_peers: other workers, where blocks may come from there; not with several ranks.

    None where no tier is asked for, or none can be had.
    """
    copies, ranks = Copies(slabs), 1 if others is None else 1 + others.count
    sizes = _Sizes.of(cache, copies.slab_bytes, ranks)
    disk = None
    if cache.nvme_kv_path is not None:
        form = SlabForm(root.hex(), copies.slab_bytes, sizes.disk, ranks)
        disk = _try_disk(cache.nvme_kv_path, form, copies, threads)
    if not sizes.host and disk is None and make_peers is None:
        return None
    assert make_peers is None or others is None, "a rank fetches nothing by itself"
    store = open_store(copies, sizes.host_slots, disk, threads)
    if others is not None:
        _open_others(others, store, sizes.host_slots)
        if not sizes.host and store.disk is None:
            store.close()
            return None
    return _tiers(cache, sizes, copies, pool, sink, store, others, make_peers)


def _tiers(
    cache: CacheConfig,
    sizes: _Sizes,
    copies: Copies,
    pool: BlockPool,
    sink: EventSink,
    store: Store,
    others: OtherStores | None,
    make_peers: MakeNeighbours | None,
) -> KvTiers:
    slab_bytes, transfers = copies.slab_bytes, Transfers(store, others)
    nvme = None if store.disk is None else _disk_tier(store.disk, copies, sink)
    host = _host_tier(store, copies, sizes, sink, nvme)
    ways = {host: Kind.LOAD}
    writer = None
    if nvme is not None:
        ways[nvme] = Kind.READ
        writer = Writer(host, nvme, transfers, slab_bytes, hold=sizes.host < FEW_SLOTS)
    saver = Saver(pool, host, transfers, slab_bytes, writer)
    own, peers = [*ways], None
    if make_peers is not None:
        peers = make_peers(pool, copies, host, store.read)
        ways[peers.tier] = Kind.FETCH
        store.fetch = peers.fetch
    # what comes from disk is worth a place in memory as well, if that is more than a stage
    on_arrival = saver.offer if sizes.host else None
    return KvTiers(
        own,
        saver,
        Loader(pool, transfers, ways, slab_bytes, on_arrival),
        transfers,
        peers,
        slab_bytes=slab_bytes,
        policy=cache.kv_restore,
        staged=not sizes.host,
        close=store.close,
    )


def _try_disk(folder: Path, form: SlabForm, copies: Copies, threads: Threads) -> Disk | None:
    try:
        return open_disk(folder, form, copies, threads=threads)
    except OSError as error:
        _leave_out(error)
        return None


def _open_others(others: OtherStores, store: Store, host_slots: int) -> None:
    """A disk that one rank cannot have is of no use to the others."""
    disk = store.disk
    form, number = (None, 0) if disk is None else (disk.file.form, disk.file.number)
    error = others.open(host_slots, form, number)
    if error is not None:
        _leave_out(error)
        others.close_disk()
        store.close_disk()


def _leave_out(error: object) -> None:
    log.warning("the nvme tier of the KV cache is left out: %s", error)


def _host_tier(store: Store, copies: Copies, sizes: _Sizes, sink: EventSink, below: Tier | None) -> Tier:
    """A tier of its own, or a stage on the way to disk, of which nobody is told."""
    told, slots = sink if sizes.host else None, sizes.host_slots

    def load(index: int) -> Future[Any]:
        return store.start(Kind.LOAD, [Piece(index % copies.blocks, host=index % slots)], _ignore)

    tier = Tier("cpu", Slots(slots), _measure(load, copies.slab_bytes), told, below)
    if told is not None:
        log.info("cpu tier of the KV cache: %s", _description(tier, copies.slab_bytes))
    return tier


def _disk_tier(disk: Disk, copies: Copies, sink: EventSink) -> Tier:
    file = disk.file

    def read(index: int) -> None:
        file.probe(index, disk.buffers.pages(index), write=False)
        copies.load([(index % copies.blocks, disk.buffers.slab(index))], None)

    link = _measure(lambda index: disk.read.submit(read, index), copies.slab_bytes)
    tier = Tier("nvme", Slots(file.form.slots), link, sink)
    tier.adopt(_found(disk))
    log.info(
        "nvme tier of the KV cache: %s%s, %d blocks from before; %s",
        file.path,
        "" if file.direct else " (buffered: the filesystem has no O_DIRECT)",
        len(tier.slots),
        _description(tier, copies.slab_bytes),
    )
    return tier


def _found(disk: Disk) -> list[Entry]:
    """Blocks from before, that each rank has, and in the same slot."""
    file, entries = disk.file, disk.file.load_index()
    for rank in range(1, file.form.tp_size):
        path = rank_path(file.path.parent, file.number, rank)
        theirs = stored_slots(path, replace(file.form, rank=rank))
        entries = [entry for entry in entries if theirs.get(entry.name) == entry.slot]
    return entries


def _measure(begin: Callable[[int], Future[Any]], size: int) -> Link:
    """What one block of `size` bytes takes, and several at once; each the best of a few tries."""

    def seconds(count: int) -> float:
        began = time.perf_counter()
        for future in [begin(index) for index in range(count)]:
            future.result()
        return time.perf_counter() - began

    one, many = (min(seconds(count) for _ in range(PROBE_TRIES)) for count in (1, PROBE_SLABS))
    return Link.measured(one, many, size, PROBE_SLABS)


def _ignore(_outcome: Outcome) -> None:
    """Of a move that is only timed."""


def _description(tier: Tier, slab_bytes: int) -> str:
    gib = tier.slots.total * slab_bytes / GIB
    speed = f"{tier.link.bytes_per_s / 1e9:.1f} GB/s after {tier.link.latency_s * 1e6:.0f} µs"
    return f"{tier.slots.total} blocks in {gib:.1f} GiB, back at {speed}"

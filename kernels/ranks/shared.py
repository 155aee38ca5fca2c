"""A rank's end of the memory that all ranks of a host share: sums and rows between them, on CPUs.

All ranks call the same, in the same order. A rank that does not come in time ends it: `lost` is true from
then on, and results are worthless. Knows tensors and a file descriptor, nothing of processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import numpy as np
import torch
from torch import Tensor

from ..cpu.native import Kernels, library

# of each rank twice; a larger tensor goes in pieces
SLOT_BYTES = 1 << 20
CONTROL_BYTES = 8192
SPIN_US = 50.0


class ExchangeMemory:
    """fd: of memory for so many ranks, to be inherited by their processes."""

    def __init__(self, ranks: int) -> None:
        self.fd = os.memfd_create("decodefleet-ranks")
        os.ftruncate(self.fd, _bytes(ranks))
        self._control = mmap.mmap(self.fd, CONTROL_BYTES)

    def abort(self) -> None:
        """A rank is known to be gone: nobody waits for it any longer. Any thread, also after `close`."""
        self._control[:4] = (1).to_bytes(4, sys.byteorder)

    def close(self) -> None:
        os.close(self.fd)


def make_exchange(ranks: int) -> ExchangeMemory | None:
    """None where there are no native kernels, by which it is used."""
    return None if library() is None else ExchangeMemory(ranks)


class RankExchange:
    """memory: descriptor of an `ExchangeMemory`, which may be closed afterwards.

    spin_us: how long a rank waits awake.
    """

    def __init__(
        self,
        memory: int,
        rank: int,
        ranks: int,
        *,
        patience_s: float,
        spin_us: float | None = None,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """Raises RuntimeError where there are no native kernels."""
        kernels = library()
        if kernels is None:
            raise RuntimeError("ranks share memory by native kernels, which could not be compiled")
        self._kernels: Kernels = kernels
        self._memory = mmap.mmap(memory, _bytes(ranks))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        # awake on a core that another rank needs, a rank would wait the longer
        spin = spin_us if spin_us is not None else SPIN_US if ranks <= len(os.sched_getaffinity(0)) else 0.0
        # `Member` in cpu.cpp
        places = [start, start + CONTROL_BYTES, rank, ranks, slot_bytes]
        self._member = np.array([*places, int(1e3 * spin), int(1e9 * patience_s), 0, 0], dtype=np.int64)
        self._address = self._member.ctypes.data

    @property
    def lost(self) -> bool:
        """Whether a rank did not come."""
        return bool(self._member[8])

    def set_patience(self, seconds: float) -> None:
        """How long to wait for another rank in one exchange."""
        self._member[6] = int(1e9 * seconds)

    def sum_(self, x: Tensor) -> None:
        """x (contiguous bf16 or fp32) becomes the sum of all ranks' x, see `reference.sum_ranks`."""
        self._kernels.df_sum_ranks(self._address, x.data_ptr(), x.numel(), x.dtype == torch.float32)

    def add_sum_(self, x: Tensor, residual: Tensor) -> None:
        """residual (fp32) += all ranks' x (contiguous bf16 or fp32), see `reference.add_sum_ranks_`."""
        wide = x.dtype == torch.float32
        self._kernels.df_add_sum_ranks(self._address, x.data_ptr(), residual.data_ptr(), x.numel(), wide)

    def join(self, x_RN: Tensor, widest: int, columns: int) -> Tensor:
        """On rank 0 all ranks' columns (fp32, contiguous) side by side, [R, columns]; x itself on the others.

        widest: columns of one rank at most; only the last ranks have fewer.
        """
        leads, rows = self._member[2] == 0, x_RN.shape[0]
        out_RN = x_RN.new_empty(rows, columns) if leads else x_RN
        self._kernels.df_join_ranks(self._address, x_RN.data_ptr(), out_RN.data_ptr(), rows, widest, columns)
        return out_RN

    def from_rank_0(self, x: Tensor) -> None:
        """x (contiguous) becomes rank 0's."""
        self._kernels.df_from_rank_0(self._address, x.data_ptr(), x.nbytes)


def _bytes(ranks: int) -> int:
    return CONTROL_BYTES + 2 * ranks * SLOT_BYTES

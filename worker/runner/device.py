"""Which device, which dtype, how many threads: what the configuration leaves to the machine."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from decodefleet.kernels import ops

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError
from ..config import EngineConfig, KvCacheDtype, RunnerConfig
from ..parallel.group_ranks import join
from ..parallel.ranks import Ranks
from ..parallel.shard import Shard
from ..parallel.shared_ranks import SharedRanks

# until all ranks have come together, and while they load: one may compile what others find compiled
PATIENCE_AT_START_S = 600.0
# in a step, which all of them begin together
PATIENCE_S = 10.0


def choose_device(wanted: str) -> torch.device:
    """Raises ModelError where CUDA is asked for and there is none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "There is no usable CUDA device.", "Install a CUDA build of torch, or pass `--device cpu`."
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def choose_dtype(wanted: str, info: ModelInfo) -> torch.dtype:
    name = wanted if wanted != "auto" else info.dtype or "bfloat16"
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ModelError(
            f"The checkpoint's dtype {name} is not supported.", f"Pass --dtype {', '.join(dtypes)}."
        )
    return dtypes[name]


def choose_kv_dtype(wanted: KvCacheDtype, model: torch.dtype) -> torch.dtype:
    return {"auto": model, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[wanted]


def rank_device(config: RunnerConfig, rank: int) -> torch.device:
    """The rank's own GPU, made the current one, or the CPU that all share. Raises ModelError."""
    device = choose_device(config.device)
    if device.type == "cuda" and config.tensor_parallel_size > 1:
        if torch.cuda.device_count() < config.tensor_parallel_size:
            raise ModelError(
                f"--tensor-parallel-size {config.tensor_parallel_size} takes as many GPUs; "
                f"{torch.cuda.device_count()} can be seen.",
                "Pass a smaller --tensor-parallel-size, or make more GPUs visible.",
            )
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    return device


def is_invariant(config: RunnerConfig) -> bool:
    on_gpu = choose_device(config.device).type == "cuda"
    return not on_gpu if config.batch_invariant is None else config.batch_invariant


def meet(config: EngineConfig, info: ModelInfo, rank: int, store: Path, exchange: int | None) -> Ranks:
    """The other ranks. store: file by which a process group comes together; exchange: memory of
    `ops.make_exchange` instead, if any. Raises ModelError where the model cannot be divided among them.
    """
    shard = Shard.of(info, rank, config.runner.tensor_parallel_size)
    if exchange is not None:
        return SharedRanks(shard, exchange, patience_s=PATIENCE_AT_START_S)
    device = rank_device(config.runner, rank)
    return join(shard, device, store, patience_s=PATIENCE_AT_START_S, ordered=is_invariant(config.runner))


def set_threads(config: RunnerConfig, dtype: torch.dtype) -> None:
    """Each rank gets its share of them."""
    threads = config.threads or len(os.sched_getaffinity(0))
    ops.set_cpu_threads(max(1, threads // config.tensor_parallel_size), dtype)

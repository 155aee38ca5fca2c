"""Which device, which dtype, how many threads: what the configuration leaves to the machine."""

from __future__ import annotations

import os

import torch

from decodefleet.kernels import ops

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError
from ..config import KvCacheDtype, RunnerConfig


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


def set_threads(config: RunnerConfig, dtype: torch.dtype) -> None:
    ops.set_cpu_threads(config.threads or len(os.sched_getaffinity(0)), dtype)

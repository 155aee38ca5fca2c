"""Compiles every kernel ahead of time, without a GPU, and reads what the compilers made of it.

Each operation lists `VARIANTS`: names for example calls of its launchers on tensors that have shapes but no
memory. Such a call goes through Triton's own binder, so what is compiled is what a real call
would run. Triton caches the results (`TRITON_CACHE_DIR`). Runs in processes of its own: the choice between
compiling and interpreting is made when a kernel's module is imported.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .launch import CHIPS, pretend

MODULES = (
    "kv_cache.kernel",
    "linear.kernel",
    "logprobs.kernel",
    "moe.kernel",
    "norm_linear.kernel",
    "paged_attention.variants",
    "penalties.kernel",
    "rms_norm.kernel",
    "rotary.kernel",
    "sampling.kernel",
    "silu_mul.kernel",
)
OPERATIONS = {module.partition(".")[0]: module for module in MODULES}


@dataclass(frozen=True)
class Compiled:
    """One kernel of one variant for one chip.

    registers: per thread; spills: bytes per thread that live in memory for want of registers;
    shared: bytes per program; occupancy: share of a multiprocessor's warps that fit, by these and the warps.
    """

    kernel: str
    variant: str
    target: str
    registers: int
    spills: int
    shared: int
    warps: int
    occupancy: float


@dataclass(frozen=True)
class _Limits:
    """Of one multiprocessor: 32-bit registers and warps, shared bytes, lanes of a warp."""

    registers: int
    shared: int
    warps: int
    lanes: int


_LIMITS = {
    "sm_80": _Limits(65536, 164 << 10, 64, 32),
    "sm_90": _Limits(65536, 228 << 10, 64, 32),
    "sm_100": _Limits(65536, 228 << 10, 64, 32),
    "gfx942": _Limits(4 * 512 * 64, 64 << 10, 32, 64),
}


def variants(operations: Iterable[str] = OPERATIONS) -> list[tuple[str, str]]:
    """(operation, variant), as frozen by the tests."""
    return [(operation, name) for operation in operations for name in _calls(operation)]


def compile_variants(
    wanted: Sequence[tuple[str, str]], targets: Sequence[str] = tuple(CHIPS), *, processes: int = 2
) -> list[Compiled]:
    """Rows in the order of `wanted`, then of targets. Raises what the compiler raises."""
    tasks = [(operation, name, target) for operation, name in wanted for target in targets]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker) as pool:
        return [row for rows in pool.map(_compile, *zip(*tasks, strict=True)) for row in rows]


def _calls(operation: str) -> Mapping[str, Callable[[], None]]:
    module = importlib.import_module(f".{OPERATIONS[operation]}", __package__)
    calls: Mapping[str, Callable[[], None]] = module.VARIANTS
    return calls


def _start_worker() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(operation: str, variant: str, target: str) -> list[Compiled]:
    _use_driver(target)
    rows: list[Compiled] = []

    def record(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        made = kernel.warmup(*args, grid=(1,), **options)
        name = kernel.fn.__name__.removeprefix("_").removesuffix("_kernel")
        registers, spills = _amd_usage(made) if "amdgcn" in made.asm else _nvidia_usage(made)
        shared, warps = made.metadata.shared, made.metadata.num_warps
        occupancy = _occupancy(_LIMITS[target], registers, shared, warps)
        rows.append(Compiled(name, variant, target, registers, spills, shared, warps, occupancy))

    with pretend(CHIPS[target], record):
        _calls(operation)[variant]()
    return rows


def _use_driver(target: str) -> None:
    """Tells Triton that the chip is there; nothing is loaded onto it."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime.driver import driver

    if target.startswith("gfx"):
        gpu = GPUTarget("hip", target, 64)
    else:
        gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)

    class AbsentDriver(DriverBase):  # type: ignore[misc]
        is_active = classmethod(lambda cls: True)
        map_python_to_cpp_type = get_active_torch_device = get_benchmarker = None

        def get_current_target(self) -> GPUTarget:
            return gpu

        def get_current_device(self) -> int:
            # Triton keeps what it compiled per device
            return tuple(CHIPS).index(target)

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(AbsentDriver())


def _nvidia_usage(made: Any) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        command = [str(_tool("cuobjdump")), "--dump-resource-usage", str(cubin)]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def _amd_usage(made: Any) -> tuple[int, int]:
    # accumulation registers are among the vector registers; scalar registers spill to lanes of those,
    # which costs no memory
    used = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", made.asm["amdgcn"]))
    return int(used["vgpr_count"]), int(used["private_segment_fixed_size"])


@cache
def _tool(name: str) -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _occupancy(limits: _Limits, registers: int, shared: int, warps: int) -> float:
    # both are handed out in steps: 8 registers per thread, and 1 KiB of shared memory kept by the system
    per_warp = -(-max(registers, 1) // 8) * 8 * limits.lanes
    programs = min(
        limits.registers // per_warp // warps,
        limits.shared // (shared + 1024),
        limits.warps // warps,
    )
    return min(1.0, programs * warps / limits.warps)

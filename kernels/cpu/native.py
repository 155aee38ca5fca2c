"""The C++ kernels for CPUs: compiled once for this very machine, loaded, and typed.

`library()` is None where there is no C++ compiler or compiling fails; `status()` says why, for people. The
shared object is kept in the user's cache under a name made of sources, compiler and processor, so that a
change of any of them makes a new one; or it was compiled ahead (`prebuilt.py`). Nothing here knows what the
kernels compute.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import prebuilt

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "cpu/pool.cpp",
    "cpu/replay.cpp",
    "cpu/rows.cpp",
    "linear/cpu.cpp",
    "moe/cpu.cpp",
    "paged_attention/cpu.cpp",
    "ranks/cpu.cpp",
    "rotary/cpu.cpp",
    "sampling/cpu.cpp",
)
HEADERS = (
    "cpu/entry.h",
    "cpu/pool.h",
    "cpu/product.h",
    "cpu/simd.h",
    "linear/panels.h",
    "paged_attention/cpu_keys.h",
)
# one rounding per operation as written: contraction would differ between the variants of a kernel
FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno"),
    *("-shared", "-fPIC", "-pthread", "-Wall", "-Wno-psabi", "-Wno-maybe-uninitialized"),
)
COMPILE_LIMIT_S = 300

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
# each kind of argument in a word of 64 bits
_WORDS = {_POINTER: "Q", _INT64: "q", _INT: "i4x", _FLOAT: "f4x"}
_SIGNATURES: dict[str, list[Any]] = {
    "df_pack_linear": [_POINTER, _INT64, _INT64, _POINTER],
    "df_pack_linear_int8": [_POINTER, _INT64, _INT64, _POINTER],
    "df_linear": [_POINTER] * 5 + [_INT64] * 3 + [_INT],
    "df_paged_attention": [_POINTER] * 9 + [_INT64] * 12 + [_FLOAT] * 2,
    "df_embed": [_POINTER] * 3 + [_INT64] * 4 + [_FLOAT],
    "df_add_rms_norm": [_POINTER] * 4 + [_INT64] * 2 + [_FLOAT] * 2,
    "df_norm_add": [_POINTER] * 3 + [_INT64] * 2 + [_FLOAT] * 2,
    "df_norm_heads": [_POINTER] * 2 + [_INT64] * 4 + [_FLOAT] * 2,
    "df_route": [_POINTER] * 6 + [_INT64] * 3 + [_INT],
    "df_experts": [_POINTER] * 6 + [_INT64] * 4 + [_INT],
    "df_combine": [_POINTER] * 4 + [_INT64] * 3,
    "df_rotary_store": [_POINTER] * 8 + [_INT64] * 9,
    "df_angles": [_POINTER] * 3 + [_INT64] * 3,
    "df_argmax": [_POINTER, _INT64, _INT64, _POINTER],
    "df_sample": [_POINTER, _INT64, _INT64, *[_POINTER] * 7],
    "df_sum_ranks": [_POINTER] * 2 + [_INT64, _INT],
    "df_add_sum_ranks": [_POINTER] * 3 + [_INT64, _INT],
    "df_join_ranks": [_POINTER] * 3 + [_INT64] * 3,
    "df_from_rank_0": [_POINTER] * 2 + [_INT64],
    "df_silu_mul": [_POINTER] * 2 + [_INT64] * 2,
    "df_gelu_tanh_mul": [_POINTER] * 2 + [_INT64] * 2,
}


class Kernel:
    """One entry of the library: callable as its signature says, pointers as integers or None."""

    def __init__(self, owner: Kernels, name: str, function: Any, packed_address: int) -> None:
        self.name = name
        self.packed_address = packed_address
        self._owner = owner
        self._function = function
        self._words = struct.Struct("<" + "".join(_WORDS[kind] for kind in _SIGNATURES[name]))

    def __call__(self, *arguments: int | float | None) -> int | None:
        if self._owner.on_call is not None:
            self._owner.on_call(self, arguments)
        result: int | None = self._function(*arguments)
        return result

    def pack(self, arguments: tuple[int | float | None, ...]) -> bytes:
        """One 64-bit word per argument, as `entry.h` reads them."""
        return self._words.pack(*(0 if value is None else value for value in arguments))


class Kernels:
    """The loaded library: one attribute per entry. on_call: told of every call, while somebody records."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.on_call: Callable[[Kernel, tuple[int | float | None, ...]], None] | None = None
        self.replay = _typed(loaded, "df_replay", [_POINTER, _INT64])
        self.set_threads = _typed(loaded, "df_set_threads", [_INT])
        for name, arguments in _SIGNATURES.items():
            packed = ctypes.cast(getattr(loaded, f"{name}_packed"), ctypes.c_void_p).value
            setattr(self, name, Kernel(self, name, _typed(loaded, name, arguments), packed or 0))

    def __getattr__(self, name: str) -> Kernel:
        raise AttributeError(f"the native library has no entry {name}")


@dataclass(frozen=True)
class Build:
    """kernels: loaded, or None; status: which path is in use and why."""

    kernels: Kernels | None
    status: str


def library() -> Kernels | None:
    return _build().kernels


def status() -> str:
    return _build().status


def prebuild(folder: Path = prebuilt.FOLDER, levels: Iterable[str] = tuple(prebuilt.LEVELS)) -> list[Path]:
    """Compiles for each of these instruction sets, for machines without a compiler; answers the files.

    Raises OSError or SubprocessError where this machine has none, or it fails.
    """
    compiler = _compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (g++ or clang++) was found")
    made = {level: prebuilt.path_of(level, _sources(), folder) for level in levels}
    for level, target in made.items():
        _compile(compiler, level, target)
    return list(made.values())


@functools.cache
def _build() -> Build:
    ready = prebuilt.find(_sources(), prebuilt.processor_flags())
    if ready is not None:
        level, path = ready
        try:
            return Build(_load(path), f"native kernels, compiled ahead for {level}")
        except OSError as error:
            log.warning("the CPU kernels that were compiled ahead do not load: %s", error)
    compiler = _compiler()
    if compiler is None:
        return Build(None, "plain torch, slower: no C++ compiler (g++ or clang++) was found")
    try:
        path = _compiled(compiler)
        return Build(_load(path), f"native kernels, compiled by {Path(compiler).name}")
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None)
        log.warning("the CPU kernels did not compile: %s", output or error)
        return Build(None, f"plain torch, slower: {compiler} could not compile the kernels")


def _compiled(compiler: str) -> Path:
    """Path of the shared object, compiled unless it is there; safe against others doing the same."""
    target = _cache_folder() / f"cpu-{_key(compiler)}.so"
    if not target.is_file():
        log.info("compiling the CPU kernels, once for this machine")
        _compile(compiler, "native", target)
    return target


def _compile(compiler: str, architecture: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        sources = (str(ROOT / name) for name in SOURCES)
        command = [compiler, *FLAGS, f"-march={architecture}", "-o", str(made), *sources]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        made.replace(target)


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _sources() -> str:
    """Digest of what is compiled, and how."""
    state = hashlib.blake2b(" ".join(FLAGS).encode(), digest_size=12)
    for name in (*SOURCES, *HEADERS):
        state.update((ROOT / name).read_bytes())
    return state.hexdigest()


def _key(compiler: str) -> str:
    state = hashlib.blake2b(_sources().encode(), digest_size=12)
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=60).stdout
    for part in (version, platform.machine().encode(), _processor()):
        state.update(part)
    return state.hexdigest()


def _processor() -> bytes:
    """What -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted))).encode()


def _cache_folder() -> Path:
    base = os.environ.get("DECODEFLEET_CACHE")
    if base:
        return Path(base) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decodefleet" / "kernels"


def _load(path: Path) -> Kernels:
    return Kernels(ctypes.CDLL(str(path)))


def _typed(loaded: ctypes.CDLL, name: str, arguments: list[Any]) -> Any:
    function = getattr(loaded, name)
    function.argtypes = arguments
    function.restype = None
    return function

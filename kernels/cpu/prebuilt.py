"""CPU kernels that were compiled ahead, as in a container image without a compiler: which of them fits here.

They lie beside this file, named by instruction set and by the sources that they were made of. Knows x86 only:
elsewhere nothing fits, and `native.py` compiles.
"""

from __future__ import annotations

import platform
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "prebuilt"
# best first: what -march is told, and what /proc/cpuinfo must list
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"})
LEVELS = {
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": _V3,
}


def path_of(level: str, sources: str, folder: Path = FOLDER) -> Path:
    return folder / f"cpu-{level}-{sources}.so"


def find(sources: str, flags: frozenset[str], folder: Path = FOLDER) -> tuple[str, Path] | None:
    """(level, file) of the best one that a processor with these flags can run.

    sources: digest of what it must have been made of.
    """
    for level, needed in LEVELS.items():
        path = path_of(level, sources, folder)
        if needed <= flags and path.is_file():
            return level, path
    return None


def processor_flags() -> frozenset[str]:
    """As Linux lists them; none where this is no x86."""
    if platform.machine() != "x86_64":
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()

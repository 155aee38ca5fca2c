"""What the check runs on, as JSON."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {name: installed(name) for name in ("triton", "transformers", "flashinfer-python", "flash-attn")}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "memory_gib": round(properties.total_memory / (1 << 30)),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda or torch.version.hip,
        }
    options.json.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


if __name__ == "__main__":
    main()

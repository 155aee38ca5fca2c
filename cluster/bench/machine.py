"""Where a benchmark ran: machine, date, commit and command, so that its numbers can be judged later."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil


def provenance() -> dict[str, Any]:
    """JSON-ready. What cannot be found out is None."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *_without_secrets(sys.argv[1:])]),
        "version": version("decodefleet"),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": _gpus(),
            "os": platform.platform(),
            "python": platform.python_version(),
        },
    }


def _without_secrets(arguments: list[str]) -> list[str]:
    shown = list(arguments)
    for index, argument in enumerate(arguments):
        if argument == "--api-key" and index + 1 < len(arguments):
            shown[index + 1] = "***"
        elif argument.startswith("--api-key="):
            shown[index] = "--api-key=***"
    return shown


def _commit() -> str | None:
    folder = Path(__file__).resolve().parent
    return _first_line(["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"])


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _gpus() -> list[str]:
    listing = _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    return listing.splitlines() if listing else []


def _first_line(command: list[str]) -> str | None:
    lines = (_output(command) or "").splitlines()
    return lines[0] if lines else None


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

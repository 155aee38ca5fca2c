"""Runs the parts of the GPU check one after the other, each in a process and a time limit of its own.

A part that fails or overruns is recorded, and the next one starts. The report is written after each part, so
that whatever ends the check leaves what is known.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import table

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# of the whole check, in seconds
TOTAL = 460.0
TAIL = 4000


@dataclass(frozen=True)
class Part:
    """result: JSON, or JUnit XML, that the command leaves; limit: seconds."""

    name: str
    command: list[str]
    result: Path
    limit: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers: a dry run")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these parts only")
    options = parser.parse_args()
    chosen = [part for part in parts(options) if options.only is None or part.name in options.only]
    report: dict[str, Any] = {"device": options.device, "tiny": options.tiny, "parts": {}}
    deadline = time.monotonic() + TOTAL
    for part in chosen:
        print(f"== {part.name}", flush=True)
        report["parts"][part.name] = run(part, deadline - time.monotonic())
        (options.out / "gpu_check.json").write_text(json.dumps(report, indent=1))
        (options.out / "gpu_check.txt").write_text(table(report))
    print(table(report))
    return 0 if all(part["ok"] for part in report["parts"].values()) else 1


def parts(options: argparse.Namespace) -> list[Part]:
    out, python = options.out, sys.executable
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=20"]
    # off a GPU the kernels would be interpreted, which takes minutes
    only_gpu = ["-m", "gpu"] if options.device == "cpu" else []
    model = ["--device", options.device, *(["--tiny", "--steps", "4"] if options.tiny else [])]
    few = [*model, "--batches", "1", "64"]

    def pytest(name: str, limit: float, *args: str) -> Part:
        result = out / f"{name}.xml"
        return Part(name, [*tests, f"--junitxml={result}", *args], result, limit)

    def script(name: str, limit: float, file: str, *args: str) -> Part:
        result = out / f"{name}.json"
        return Part(name, [python, str(HERE / file), "--json", str(result), *args], result, limit)

    return [
        script("machine", 60, "machine.py"),
        script("engine", 120, "engine_bench.py", *model),
        script("kernels", 90, "kernel_bench.py", "--device", options.device),
        pytest("exactness", 90, "-m", "gpu", "tests/worker/test_exactness.py", "tests/worker/runner"),
        pytest("kernel_tests", 150, *only_gpu, "tests/kernels/triton"),
        script("engine_eager", 60, "engine_bench.py", *few, "--enforce-eager"),
        script("engine_invariant", 60, "engine_bench.py", *few, "--batch-invariant"),
    ]


def run(part: Part, left: float) -> dict[str, Any]:
    """What a part did: ok, seconds, what went wrong, its own result."""
    if left <= 1:
        return {"ok": False, "seconds": 0.0, "error": "no time was left", "result": None}
    part.result.unlink(missing_ok=True)
    began = time.monotonic()
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    error = None
    try:
        output, _ = process.communicate(timeout=min(part.limit, left))
        # pytest says with 5 that no test was chosen
        if process.returncode not in (0, 5):
            error = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        error = f"not done after {min(part.limit, left):.0f} s"
    seconds = time.monotonic() - began
    if error:
        print(output[-TAIL:], flush=True)
    result = read(part.result)
    done = {"ok": error is None, "seconds": round(seconds, 1), "error": error, "result": result}
    return {**done, "output": output[-TAIL:]} if error else done


def read(path: Path) -> Any:
    """A part's result; None where it left none."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text())
        return read_tests(ET.parse(path).getroot())
    except (OSError, ValueError, ET.ParseError):
        return None


def read_tests(root: ET.Element) -> dict[str, Any]:
    cases = list(root.iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    return {"passed": passed, "skipped": skipped, "failed": failed}


if __name__ == "__main__":
    sys.exit(main())

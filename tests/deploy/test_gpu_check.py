"""A dry run of the GPU check on CPU: all of it but the kernels, with a model of two small layers."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "gpu_check.sh"


def gpu_check(out: Path, *args: str) -> tuple[int, dict[str, Any], str]:
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", str(SCRIPT), "--device", "cpu", "--tiny", *args],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads((out / "gpu_check.json").read_text())
    return done.returncode, report, (out / "gpu_check.txt").read_text()


def test_the_engine_is_measured_with_graphs_and_without(tmp_path: Path) -> None:
    code, report, text = gpu_check(tmp_path, "--only", "machine", "engine", "engine_eager")
    assert code == 0, text
    parts = report["parts"]
    assert list(parts) == ["machine", "engine", "engine_eager"]
    assert all(part["ok"] and part["error"] is None for part in parts.values())
    for name, batches in (("engine", [1, 8, 64, 256]), ("engine_eager", [1, 64])):
        rows = parts[name]["result"]["decode"]
        assert [row["batch"] for row in rows] == batches
        assert all(row["tpot"] > 0 and row["floor"] > 0 and row["host"] <= row["tpot"] for row in rows)
        # prompts of 256 tokens, and what was generated since
        assert all(256 < row["context"] < 600 for row in rows)
    assert "× floor" in text
    assert text.count("prefill of 512 tokens") == 2


def test_what_needs_a_gpu_is_skipped_and_what_fails_stops_nothing(tmp_path: Path) -> None:
    code, report, text = gpu_check(tmp_path, "--only", "exactness", "no_such_part", "machine")
    assert code == 0, text
    tests = report["parts"]["exactness"]["result"]
    assert tests["passed"] == 0
    assert tests["failed"] == []
    assert tests["skipped"] > 5


def test_a_part_that_overruns_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent / "gpu_check")
    check = importlib.import_module("check")
    result = tmp_path / "result.json"
    command = ["bash", "-c", 'echo "[1]" > "$0"; echo here; sleep 600', str(result)]
    part = check.Part("slow", command, result, limit=3.0)
    done = check.run(part, left=100.0)
    assert not done["ok"]
    assert done["error"] == "not done after 3 s"
    assert (done["result"], done["output"]) == ([1], "here\n")
    assert check.run(part, left=0.5)["error"] == "no time was left"
    broken = check.Part("broken", [sys.executable, "-c", "raise SystemExit(3)"], result, limit=60.0)
    assert check.run(broken, left=100.0)["error"] == "exit status 3"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck() -> None:
    subprocess.run(["shellcheck", str(SCRIPT)], check=True)


def test_the_script_parses() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)

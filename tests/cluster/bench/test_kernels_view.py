from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from decodefleet.cluster.bench.kernels_view import compiled_table, timed_table, write_rows
from decodefleet.cluster.bench.options import BenchError
from decodefleet.cluster.cli import app


def text(table: object) -> str:
    console = Console(width=200, record=True)
    console.print(table)
    return console.export_text()


def test_one_line_per_variant_and_one_column_per_target() -> None:
    row = {
        "kernel": "decode",
        "variant": "64",
        "registers": 96,
        "spills": 0,
        "shared": 2048,
        "occupancy": 0.5,
    }
    shown = text(compiled_table([{**row, "target": "sm_80"}, {**row, "target": "sm_90", "spills": 8}]))
    assert "sm_80" in shown
    assert "96 2K 50%" in shown
    assert "96 2K 50% 8" in shown


def test_times_stand_beside_the_limits() -> None:
    row = {"kernel": "linear", "variant": "qkv", "microseconds": 1234.5, "limit": 0.87, "gb_per_s": 20.0}
    row |= {"tflops": 0.1, "reference": 2.5, "error": 1e-3, "peers": {"torch": 1.5}}
    shown = text(timed_table({"gb_per_s": 23.0, "tflops": 0.4}, [row]))
    for part in ("23.0 GB/s", "1,234.5", "87%", "torch 1.50x", "2.50x"):
        assert part in shown


def test_a_file_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot write"):
        write_rows(tmp_path / "absent" / "rows.json", [])


@pytest.mark.slow
def test_bench_kernels_on_this_machine(tmp_path: Path) -> None:
    rows, timings = tmp_path / "rows.json", tmp_path / "timings.json"
    arguments = ["bench", "kernels", "--op", "silu_mul", "--json", str(rows), "--timings", str(timings)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    compiled = json.loads(rows.read_text())
    assert {"kernel", "variant", "target", "registers", "spills", "shared"} <= compiled[0].keys()
    assert {row["target"] for row in compiled} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    timed = json.loads(timings.read_text())
    assert timed["limits"]["gb_per_s"] > 0
    assert [row["kernel"] for row in timed["rows"]] == ["silu_mul"]


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(BenchError, match="nonsense is none of"):
        CliRunner().invoke(app, ["bench", "kernels", "--op", "nonsense"], catch_exceptions=False)

"""`decodefleet simulate` from flags to table and files, on a small trace of its own."""

import io
import json
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from decodefleet.cluster.simulate.command import simulate
from decodefleet.cluster.simulate.options import SimulateError


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 40 * i, "input_length": 1500, "output_length": 20, "hash_ids": [i % 5, 100 + i % 5, i]}
        for i in range(60)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(**values) -> str:
    console = Console(file=io.StringIO(), width=200)
    simulate(values, console)
    return console.file.getvalue()


def test_table_json_and_plot(trace, tmp_path):
    output, plot = tmp_path / "out.json", tmp_path / "out.svg"
    shown = run(
        trace=trace,
        policy=["cost,llm-d", "round-robin"],
        workers=2,
        output=output,
        plot=plot,
        kv_tokens=20_000,
    )
    assert "60 requests of trace.jsonl on 2 workers" in shown
    written = json.loads(output.read_text())
    assert [one["policy"] for one in written["runs"]] == ["cost", "llm-d", "round-robin"]
    assert all(one["served"] == 60 for one in written["runs"])
    assert written["setup"]["trace"] == "trace.jsonl"
    # of 60 prompts 55 find the first two blocks of three
    assert written["endless_hit_rate"] == pytest.approx(55 * 1024 / (60 * 1500))
    for name in ("cost", "llm-d", "round-robin"):
        assert name in shown
        assert name in plot.read_text()
    assert ET.fromstring(plot.read_text()).tag.endswith("svg")


def test_a_narrow_terminal_cuts_nothing(trace):
    values = {"trace": trace, "policy": ["cost,least-load,dynamo"], "workers": 2}
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    simulate(values, console)
    shown = console.file.getvalue()
    assert "least-load" in shown
    assert "of endless" in shown
    assert "…" not in shown


def test_rate_sets_the_pace(trace, tmp_path):
    output = tmp_path / "out.json"
    run(trace=trace, rate=6.0, output=output)
    assert json.loads(output.read_text())["runs"][0]["duration_s"] == pytest.approx(10, rel=0.1)


def test_a_fleet_that_follows_the_load(trace, tmp_path):
    output, plot = tmp_path / "out.json", tmp_path / "out.svg"
    shown = run(
        trace=trace, max_workers=4, rate=0.5, startup_s=10.0, kv_tokens=20_000, output=output, plot=plot
    )
    assert "60 requests of trace.jsonl on 1 to 4 workers" in shown
    written = json.loads(output.read_text())
    names = [one["name"] for one in written["runs"]]
    # half a request a second is one worker's to serve
    assert names == ["planner", "autoscaler", "always 1"]
    assert all(one["served"] == 60 for one in written["runs"])
    assert all(one["timeline"][0][1:] == [1, 1] for one in written["runs"])
    for name in names:
        assert name in shown
        assert name in plot.read_text()
    assert ET.fromstring(plot.read_text()).tag.endswith("svg")


def test_headroom_is_paid_for_with_workers(trace, tmp_path):
    output = tmp_path / "out.json"

    def most(headroom: float) -> int:
        values = {"max_workers": 4, "rate": 0.5, "startup_s": 10.0, "kv_tokens": 20_000, "output": output}
        run(trace=trace, scale_headroom=headroom, **values)
        (ours,) = (one for one in json.loads(output.read_text())["runs"] if one["name"] == "autoscaler")
        return max(target for _, target, *_ in ours["timeline"])

    assert most(0.0) == 1
    assert most(50.0) > 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "--trace: has to be given"),
        ({"policy": ["typo"]}, "--policy typo"),
        ({"gpu": "abacus"}, "--gpu abacus"),
        ({"model": "llama-3-70b"}, "--tensor-parallel-size"),
        ({"block_size": 48}, "--block-size 48"),
        ({"skip": 60}, "--skip 60"),
        ({"workers": 0}, "--workers"),
        ({"kv_tokens": 8}, "--kv-tokens 8"),
        ({"max_workers": 2, "min_workers": 3}, "--max-workers 2 is below --min-workers 3"),
        ({"max_workers": 2, "policy": ["cost,least-load"]}, "--policy: only one"),
    ],
)
def test_what_cannot_be_asked_for(trace, values, message):
    with pytest.raises(SimulateError, match=message):
        run(**({"trace": trace} if values else {}) | values)


def test_no_folder_to_write_to(trace, tmp_path):
    with pytest.raises(SimulateError, match="no folder"):
        run(trace=trace, plot=tmp_path / "none" / "x.svg")

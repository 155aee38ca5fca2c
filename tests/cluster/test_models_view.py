from __future__ import annotations

import json
import sys

import pytest

from decodefleet.cluster import cli
from decodefleet.worker.assets.families import FAMILIES


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["decodefleet", "models", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code


def test_every_family_and_built_in_model_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    printed = capsys.readouterr().out
    for name in (*FAMILIES, "smollm2-135m", "gemma3-270m", "Any other decoder"):
        assert name in printed


def test_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--json")
    found = json.loads(capsys.readouterr().out)
    assert [row["architecture"] for row in found["architectures"]] == list(FAMILIES)
    smollm2 = next(row for row in found["builtin"] if row["name"] == "smollm2-135m")
    assert smollm2["title"] == "SmolLM2-135M-Instruct"
    assert 90e6 < smollm2["download_bytes"] < 95e6

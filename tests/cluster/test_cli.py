from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from decodefleet.cluster import cli
from decodefleet.cluster.config import options


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("DECODEFLEET_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")


class Ran:
    """A command's exit status and what it printed, by stream."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["decodefleet", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return Ran(int(ended.value.code or 0), printed.out, printed.err)

    return call


def test_help_names_every_command(run) -> None:
    for arguments in (["--help"], []):
        out = run(*arguments).out
        assert all(name in out for name in ("serve", "generate", "plan", "bench", "config", "--version"))


COMMANDS = (
    "serve",
    "generate",
    "plan",
    "config",
    "models",
    "simulate",
    "directory",
    "top",
    "health",
    "drain-node",
    "bench serve",
    "bench kernels",
    "keys new",
    "keys list",
    "keys revoke",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal_and_shows_no_type_of_a_switch(run, command: str) -> None:
    out = run(*command.split(), "--help").out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "…" not in out
    assert "bool" not in out
    # of a choice the names stand in the text, where they may break at spaces
    assert not re.search(r"<[a-z0-9]+\|", out)


@pytest.mark.parametrize("command", ["serve", "plan", "simulate", "keys new"])
def test_an_example_in_help_is_one_that_is_understood(run, command: str) -> None:
    help_ = " ".join(run(*command.split(), "--help").out.split())
    found = re.search(r"Example: decodefleet (.*?)(?:;| With | ╭)", help_)
    assert found is not None
    words = found[1].split()
    assert " ".join(words).startswith(command)
    # a flag that is misspelt is told in place of the help
    assert run(*words, "--help").status == 0
    for flag in (word for word in words if word.startswith("--")):
        assert f" {flag} " in help_, flag


def test_version(run) -> None:
    assert run("--version").out.startswith("decodefleet 0.")


def test_help_is_light() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['decodefleet', 'serve', '--help']\n"
        "from decodefleet.cluster import cli\n"
        "try:\n"
        "    cli.main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'fastapi', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_serve_offers_every_option_once(run) -> None:
    out = run("serve", "--help").out
    assert "…" not in out
    for option in options().values():
        if option.hidden or option.env_only:
            assert f"{option.flag} " not in out
        elif option.name != "model":
            shown = f"--no-{option.name.replace('_', '-')}" if option.default is True else option.flag
            assert f" {shown} " in out, shown


def test_config_tells_where_values_come_from(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("workers: 3\nport: 1\n")
    monkeypatch.setenv("DECODEFLEET_MAX_NUM_SEQS", "8")
    monkeypatch.setenv("DECODEFLEET_CLUSTER_SECRET", "hush-hush")
    out = run("config", "some/model", "--config", str(file), "--port", "99", "--no-enable-prefix-caching").out
    rows = {
        cells[1].strip(): cells[2:4]
        for cells in (line.split("│") for line in out.splitlines() if "│" in line)
    }
    found = {name: tuple(cell.strip() for cell in cells) for name, cells in rows.items()}
    assert found["model"] == ("some/model", "flag")
    assert found["port"] == ("99", "flag")
    assert found["enable_prefix_caching"] == ("False", "flag")
    assert found["workers"] == ("3", "file")
    assert found["max_num_seqs"] == ("8", "env")
    assert found["block_size"] == ("16", "default")
    assert "hush" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "0"], ["port", "greater than or equal to 1"]),
        (["config", "--config", "none.yaml"], ["none.yaml"]),
        (["plan", "no-such-model"], ["no-such-model", "smollm2-135m"]),
        (["bench", "serve", "--url", "http://127.0.0.1:1"], ["no server answers"]),
        (["generate", "hi", "--top-p", "7"], ["top_p"]),
    ],
)
def test_errors_are_one_message_without_a_traceback(run, arguments: list[str], words: list[str]) -> None:
    ran = run(*arguments)
    assert ran.status == 1
    assert ran.err.startswith("error: ")
    text = " ".join(ran.err.split())
    assert all(word in text for word in words)
    assert "Traceback" not in text
    assert "bug" not in text


def test_keys_are_listed_whole(run, tmp_path: Path) -> None:
    file = str(tmp_path / "keys.txt")
    limits = ["--requests-per-minute", "600", "--tokens-per-minute", "2000000", "--max-concurrent", "32"]
    assert run("keys", "new", file, "--tenant", "search-and-find", *limits).status == 0
    out = run("keys", "list", file).out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    lines = [line.split() for line in out.splitlines() if any(map(str.isalnum, line))]
    assert lines[1] == ["hash", "tenant", "/min", "/min", "once", "priority", "weight", "admin"]
    assert lines[2][1:] == ["search-and-find", "600", "2,000,000", "32", "0", "1"]


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["decodefleet", "plan", "no-such-model", "--debug"])
    with pytest.raises(Exception, match="no-such-model"):
        cli.main()


def test_unknown_options_suggest_the_nearest(run) -> None:
    ran = run("serve", "--prot", "1")
    assert ran.status == 2
    assert "--port" in ran.err


def test_plan_of_the_built_in_model(run, smollm2: Path) -> None:
    ran = run("plan", "--gpu-memory-gib", "1")
    assert ran.status == 0
    assert "23,040 bytes" in ran.out
    assert run("plan", "--gpu-memory-gib", "0.2").status == 1


def test_plan_offers_what_decides_about_memory_and_nothing_else(run) -> None:
    pool = {"block-size", "gpu-memory-utilization", "cpu-kv-cache-gib", "kv-cache-dtype"}
    kept = {"window", "attention-sinks", "cpu-kv-gib", "nvme-kv-path", "nvme-kv-gib"}
    model = {"dtype", "max-model-len", "max-num-batched-tokens", "tensor-parallel-size", "gpu-memory-gib"}
    offered = set(re.findall(r" --([a-z-]+) ", run("plan", "--help").out))
    assert offered == pool | kept | model | {"config", "help"}


def test_plan_takes_the_ranks_from_wherever_serve_does(
    run, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODEFLEET_TENSOR_PARALLEL_SIZE", "3")
    # one KV head of three
    assert "7,680 bytes" in run("plan", "--gpu-memory-gib", "1").out


def test_plan_reads_the_file_that_serve_is_to_read(run, smollm2: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("tensor_parallel_size: 3\nport: 9\n")
    assert "7,680 bytes" in run("plan", "--gpu-memory-gib", "1", "--config", str(file)).out

"""What was up once is started again: tried with real processes whose lives follow a script."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

# each life takes the next word: "up" or "down", and how it ends
PROGRAM = """
import os, pathlib, signal, sys, time
from rich.console import Console
from decodefleet.cluster.lives import FAILED, STOPPED, UP, Lives

script = pathlib.Path(sys.argv[1])

def life(folder):
    (folder / "ray").mkdir()
    word, _, rest = script.read_text().partition(" ")
    script.write_text(rest)
    state, end = word.split(":")
    print("life", word, flush=True)
    if state == "up":
        (folder / UP).touch()
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "waits":
        signal.signal(signal.SIGINT, lambda *_: os._exit(STOPPED))
        time.sleep(1000)
    return {"fails": FAILED, "stops": STOPPED}[end]

sys.exit(Lives(life, Console(), float(sys.argv[2]), float(sys.argv[3])).run())
"""


class Run:
    def __init__(self, folder: Path, script: str, first_pause_s: float = 0.0, steady_s: float = 0.0) -> None:
        (folder / "script").write_text(script)
        self._out = folder / "out"
        with self._out.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(folder / "script"), str(first_pause_s), str(steady_s)],
                stdout=out,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._out.read_text()

    @property
    def lives(self) -> list[str]:
        return re.findall(r"^life (\S+)", self.said, re.MULTILINE)

    @property
    def folders(self) -> list[Path]:
        return [Path(found) for found in re.findall(r"logs are in (\S+)", self.said)]


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        if run.process.poll() is None:
            run.process.kill()
        run.process.wait()
        for folder in run.folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("script", "code", "lives"),
    [
        pytest.param("down:fails", 1, 1, id="a first start that fails is final"),
        pytest.param("up:stops", 0, 1, id="what was told to stop stops"),
        pytest.param("up:fails down:fails down:fails up:stops", 0, 4, id="lost, and two starts that fail"),
        pytest.param("up:fails down:killed up:stops", 0, 3, id="a start that is killed"),
        pytest.param("up:killed up:fails up:stops", 0, 3, id="killed while it served"),
    ],
)
def test_lives_follow_each_other(script: str, code: int, lives: int, tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, script)
    runs.append(run)
    assert run.process.wait() == code, run.said
    assert run.lives == script.split()[:lives]
    assert run.said.count("starting again") == lives - 1


def test_pauses_grow_while_starts_fail(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "up:fails down:fails down:fails up:fails down:fails up:stops", 0.01)
    runs.append(run)
    assert run.process.wait() == 0
    paused = re.findall(r"starting again(?: in (\S+) s)?", run.said)
    assert paused == ["", "0.01", "0.02", "", "0.01"]


def test_what_is_lost_soon_after_it_came_up_is_started_less_and_less_often(
    tmp_path: Path, runs: list[Run]
) -> None:
    run = Run(tmp_path, "up:fails up:fails up:killed up:stops", 0.01, steady_s=1000.0)
    runs.append(run)
    assert run.process.wait() == 0
    assert re.findall(r"starting again(?: in (\S+) s)?", run.said) == ["", "0.01", "0.02"]


def test_only_the_logs_of_the_last_failure_stay(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "up:fails down:fails down:fails up:waits", 0.01)
    runs.append(run)
    until(lambda: len(run.lives) == 4)
    assert [folder.exists() for folder in run.folders] == [False, False, True]


def test_a_server_that_came_back_and_is_stopped_leaves_nothing(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "up:fails up:stops")
    runs.append(run)
    assert run.process.wait() == 0
    assert [folder.exists() for folder in run.folders] == [False]


def test_ctrl_c_between_two_lives_is_heard(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "up:fails down:fails up:waits", 60.0)
    runs.append(run)
    until(lambda: "in 60 s" in run.said)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.process.wait() == 0
    assert run.lives == ["up:fails", "down:fails"]


def test_ctrl_c_reaches_a_later_life(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "up:fails up:waits")
    runs.append(run)
    until(lambda: len(run.lives) == 2)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.process.wait() == 0
    assert run.lives == ["up:fails", "up:waits"]

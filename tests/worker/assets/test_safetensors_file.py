from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.safetensors_file import check_safetensors, write_safetensors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.zeros(0, np.uint8)}, path)
    return path


def test_reads_what_the_library_writes(file: Path) -> None:
    header = check_safetensors(file)
    assert {name: (t.dtype, t.shape, t.nbytes) for name, t in header.tensors.items()} == {
        "a": ("F32", (3, 4), 48),
        "b": ("U8", (0,), 0),
    }
    assert header.size == file.stat().st_size


def test_the_library_reads_what_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    tensors = {"x.weight": np.arange(6, dtype=np.uint16).reshape(2, 3), "y": np.array([7], np.uint16)}
    path = tmp_path / "out.safetensors"
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_safetensors(path, shapes, "U16", ((name, tensor.tobytes()) for name, tensor in tensors.items()))
    read = load_file(path)
    assert {name: read[name].tolist() for name in read} == {n: t.tolist() for n, t in tensors.items()}
    assert check_safetensors(path).tensors["y"].begin % 2 == 0


def test_data_that_does_not_follow_the_announcement_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        write_safetensors(tmp_path / "out", {"x": (2,)}, "BF16", [("x", b"123")])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.safetensors is missing"):
        check_safetensors(tmp_path / "gone.safetensors")


def test_a_truncated_file_is_named_with_expected_and_found_bytes(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    with pytest.raises(ModelError) as error:
        check_safetensors(file)
    expected = f"{file} is truncated: expected {len(whole)} bytes, found {len(whole) - 5}."
    assert error.value.what == expected
    assert "again" in error.value.do


@pytest.mark.parametrize("kept", [0, 7, 8, 20])
def test_a_file_that_ends_inside_its_header_is_truncated(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match="is truncated"):
        check_safetensors(file)


def test_a_file_with_something_behind_its_data_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(ModelError, match="longer than its header says"):
        check_safetensors(file)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"<!DOCTYPE html><html>rate limited</html>")
    with pytest.raises(ModelError, match="is not a safetensors file"):
        check_safetensors(path)


@pytest.mark.parametrize(
    "fields",
    [
        [1, 2],
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [8, 4]}},
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, fields: object) -> None:
    raw = json.dumps(fields).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 4)
    with pytest.raises(ModelError, match="broken safetensors header"):
        check_safetensors(path)

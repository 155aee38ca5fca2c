"""Every quantised type that the built-in models have, against its definition written out number by number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.gguf import convert_gguf
from decodefleet.worker.assets.progress import NoProgress

MakeGguf = Callable[..., Path]
ROWS, COLUMNS = 3, 512


def half(data: bytes) -> float:
    return float(np.frombuffer(data, np.float16)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q8_0(block: bytes) -> list[float]:
    """A scale, then 32 integers."""
    return [half(block[:2]) * signed(byte) for byte in block[2:]]


def q4_1(block: bytes) -> list[float]:
    """A scale and a minimum, then 32 numbers of 4 bits, low halves of the bytes first."""
    scale, minimum, nibbles = half(block[:2]), half(block[2:4]), block[4:]
    return [scale * q + minimum for q in [*(b & 15 for b in nibbles), *(b >> 4 for b in nibbles)]]


def q5_0(block: bytes) -> list[float]:
    """A scale, the 32 fifth bits, then the four lower ones; zero is 16."""
    scale, high, nibbles = half(block[:2]), int.from_bytes(block[2:6], "little"), block[6:]
    low = [*(b & 15 for b in nibbles), *(b >> 4 for b in nibbles)]
    return [scale * (q + 16 * (high >> i & 1) - 16) for i, q in enumerate(low)]


def q4_k(block: bytes) -> list[float]:
    """Two scales of scales; 8 scales and 8 minima of 6 bits, packed; 256 numbers of 4 bits."""
    scale, minimum, packed, nibbles = half(block[:2]), half(block[2:4]), block[4:16], block[16:]
    scales = [b & 63 for b in packed[:4]]
    minima = [b & 63 for b in packed[4:8]]
    for i in range(4):
        scales.append((packed[8 + i] & 15) | (packed[i] >> 6) << 4)
        minima.append((packed[8 + i] >> 4) | (packed[4 + i] >> 6) << 4)
    values = []
    for part in range(8):
        shift = 4 * (part % 2)
        for byte in nibbles[32 * (part // 2) : 32 * (part // 2) + 32]:
            values.append(scale * scales[part] * (byte >> shift & 15) - minimum * minima[part])
    return values


def q6_k(block: bytes) -> list[float]:
    """256 times 4 lower bits, 256 times 2 upper bits, 16 scales, and a scale of scales; zero is 32."""
    low, high, scales, scale = block[:128], block[128:192], block[192:208], half(block[208:])
    values = []
    for i in range(256):
        span, quarter, place = i // 128, i % 128 // 32, i % 32
        nibble = low[64 * span + 32 * (quarter % 2) + place] >> 4 * (quarter // 2) & 15
        upper = high[32 * span + place] >> 2 * quarter & 3
        values.append(scale * signed(scales[i // 16]) * (nibble + 16 * upper - 32))
    return values


# values, bytes, where the fp16 scales are
TYPES = {
    "Q4_1": (q4_1, 32, 20, (0, 2)),
    "Q8_0": (q8_0, 32, 34, (0,)),
    "Q5_0": (q5_0, 32, 22, (0,)),
    "Q4_K": (q4_k, 256, 144, (0, 2)),
    "Q6_K": (q6_k, 256, 210, (208,)),
}


def random_blocks(count: int, nbytes: int, scales_at: tuple[int, ...]) -> np.ndarray:
    """uint8 [count, nbytes]: any bits, but scales of ordinary size."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (count, nbytes), dtype=np.uint8)
    for at in scales_at:
        scales = random.standard_normal(count).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_those_of_the_definition(make_gguf: MakeGguf, tmp_path: Path, kind: str) -> None:
    definition, values, nbytes, scales_at = TYPES[kind]
    blocks = random_blocks(ROWS * COLUMNS // values, nbytes, scales_at)
    rows, quantization = blocks.reshape(ROWS, -1), gguf.GGMLQuantizationType[kind]
    source = make_gguf(prepare=lambda w: w.add_tensor("output.weight", rows, raw_dtype=quantization))
    (tmp_path / "out").mkdir()
    convert_gguf(source, tmp_path / "out", NoProgress())
    found = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    wanted = torch.tensor([value for block in blocks for value in definition(block.tobytes())])
    # rounded to bf16, after fp32 arithmetic in whatever order
    torch.testing.assert_close(found.float(), wanted.view(ROWS, COLUMNS), rtol=2**-8, atol=1e-4)


def test_a_type_that_is_not_known_is_named(make_gguf: MakeGguf, tmp_path: Path) -> None:
    rows = random_blocks(ROWS, 40, ())
    kind = gguf.GGMLQuantizationType.Q8_1
    source = make_gguf(prepare=lambda w: w.add_tensor("output.weight", rows, raw_dtype=kind))
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=r"output\.weight is of type Q8_1, which cannot be converted"):
        convert_gguf(source, tmp_path / "out", NoProgress())

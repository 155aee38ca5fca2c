"""Who holds what: the parts of all ranks make up the whole, and heads stay with their KV group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decodefleet.worker.assets.checkpoint import ModelInfo, read_config
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.models.weights import CheckpointWeights
from decodefleet.worker.parallel.shard import Shard


@pytest.fixture
def info(tiny_llama: Path) -> ModelInfo:
    return replace(read_config(tiny_llama), heads=8, kv_heads=2, intermediate_size=96)


@pytest.mark.parametrize(
    ("size", "kv_heads", "heads_of"),
    [(1, 2, [(0, 2)]), (2, 1, [(0, 1), (1, 2)]), (4, 1, [(0, 1), (0, 1), (1, 2), (1, 2)])],
)
def test_queries_stay_with_the_kv_head_they_read(
    info: ModelInfo, size: int, kv_heads: int, heads_of: list[tuple[int, int]]
) -> None:
    for rank, held in enumerate(heads_of):
        shard = Shard.of(info, rank, size)
        view = shard.view(info)
        assert (view.heads, view.kv_heads, view.intermediate_size) == (8 // size, kv_heads, 96 // size)
        part, queries = shard.kv_part(0, kv_heads), shard.part(0, 8 // size)
        assert (held if part is None else (part.start, part.stop)) == held
        first, last = (0, 7) if queries is None else (queries.start, queries.stop - 1)
        # four queries to a KV head
        assert (first // 4, last // 4 + 1) == held


@pytest.mark.parametrize(("size", "tokens"), [(1, 96), (2, 97), (3, 96), (4, 5), (4, 6)])
def test_every_token_is_on_one_rank(size: int, tokens: int) -> None:
    spans = []
    for rank in range(size):
        part = Shard(rank, size).vocabulary(tokens)
        spans.append(range(tokens) if part is None else range(part.start, part.stop))
        assert len(spans[-1]) <= Shard(rank, size).most_tokens(tokens)
    assert [token for span in spans for token in span] == list(range(tokens))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "size"), [(9, 3, 96, 2), (8, 2, 90, 4), (6, 2, 96, 3)]
)
def test_what_cannot_be_divided_is_said(
    info: ModelInfo, heads: int, kv_heads: int, inner: int, size: int
) -> None:
    with pytest.raises(ModelError, match="cannot be divided among"):
        Shard.of(replace(info, heads=heads, kv_heads=kv_heads, intermediate_size=inner), 0, size)


@pytest.mark.parametrize("axis", [0, 1])
def test_ranks_read_their_own_bytes_and_no_others(tiny_llama: Path, axis: int) -> None:
    name, shape = "model.layers.0.mlp.down_proj.weight", [64, 96]
    whole = _weights(tiny_llama).take(name, *shape)
    shape[axis] //= 4
    parts = []
    for rank in range(4):
        weights = _weights(tiny_llama)
        parts.append(weights.take(name, *shape, part=Shard(rank, 4).part(axis, shape[axis])))
        assert weights.nbytes == whole.nbytes // 4
    assert torch.equal(torch.cat(parts, dim=axis), whole)


def test_a_tensor_of_another_size_is_no_part(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match=r"has shape \[64, 96\]; config.json means \[64, 128\]"):
        _weights(tiny_llama).take("model.layers.0.mlp.down_proj.weight", 64, 32, part=Shard(0, 4).part(1, 32))


def _weights(folder: Path) -> CheckpointWeights:
    return CheckpointWeights(folder, torch.bfloat16, torch.device("cpu"), lambda *_: None)

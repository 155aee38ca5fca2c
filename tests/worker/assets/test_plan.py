from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_families import write_family

from decodefleet.kernels.ops import KvLayout
from decodefleet.worker.assets.checkpoint import read_config, weight_bytes
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.experts import Mixture, mixture
from decodefleet.worker.assets.plan import (
    Capacity,
    attention_doubling,
    capacity,
    kv_bytes_per_token,
    parameters,
)
from decodefleet.worker.config import KvCacheDtype
from decodefleet.worker.kv.groups import FULL, KvGroups, WindowRule

MakeFolder = Callable[..., Path]
GIB = 2**30


def test_the_real_model(smollm2: Path) -> None:
    info = read_config(smollm2)
    assert kv_bytes_per_token(info, 2) == 2 * 30 * 3 * 64 * 2
    assert parameters(info) * 2 == weight_bytes(smollm2)


@pytest.mark.slow
def test_the_real_hybrid_model(gemma3_270m: Path) -> None:
    info = read_config(gemma3_270m)
    assert kv_bytes_per_token(info, 2) == 2 * 18 * 1 * 256 * 2
    assert parameters(info) * 2 == weight_bytes(gemma3_270m)


@pytest.mark.parametrize("family", ["llama3", "qwen3", "qwen3-moe", "mixtral", "phi3"])
def test_weights_of_the_families(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family)
    assert parameters(read_config(folder)) * 2 == weight_bytes(folder)


def test_a_token_computes_with_the_experts_it_meets(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "mixtral")
    info = read_config(folder)
    assert mixture(info) == Mixture(experts=4, choices=2, inner=96, layers=frozenset({0, 1}))
    others = 2 * 2 * 3 * 64 * 96
    embeddings = 2 * info.vocab_size * info.hidden_size
    assert attention_doubling(info) == (parameters(info) - embeddings - others) / (2 * 2 * 2 * 32)


def test_more_choices_than_experts_are_refused(make_folder: MakeFolder) -> None:
    changes = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3}
    with pytest.raises(ModelError, match="3 of 2 experts"):
        mixture(read_config(make_folder(**changes)))


def test_an_8b_model_has_2_mib_per_block(make_folder: MakeFolder) -> None:
    info = read_config(
        make_folder(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            tie_word_embeddings=False,
        )
    )
    assert kv_bytes_per_token(info, 2) * 16 == 2 * 2**20
    assert kv_bytes_per_token(info, 2, tp=4) == kv_bytes_per_token(info, 2) // 4
    # more ranks than KV heads: each rank keeps one
    assert kv_bytes_per_token(info, 2, tp=16) == kv_bytes_per_token(info, 2) // 8
    assert parameters(info) == 8_030_261_248


@pytest.mark.parametrize(("kv_cache_dtype", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_a_quantised_cache_takes_what_is_really_allocated(
    smollm2: Path, kv_cache_dtype: KvCacheDtype, dtype: torch.dtype
) -> None:
    info = read_config(smollm2)
    layout = KvLayout(info.layers, info.kv_heads, 16, info.head_dim, dtype)
    assert kv_bytes_per_token(info, 2, kv_cache_dtype=kv_cache_dtype) * 16 == layout.slab_bytes


@pytest.mark.parametrize("tp", [0, 3, 5])
def test_heads_that_cannot_be_divided_are_refused(make_folder: MakeFolder, tp: int) -> None:
    with pytest.raises(ModelError, match="cannot be divided"):
        kv_bytes_per_token(read_config(make_folder()), 2, tp)


def test_what_fits() -> None:
    layout = {"per_layer": 256, "groups": KvGroups.of([FULL] * 4), "block_size": 16, "max_model_len": 1000}
    block = 1024 * 16
    assert capacity(GIB, **layout, chunk=512) == Capacity(block, 65536, 1048576, 1040, 63 * block)
    assert capacity(100, **layout, chunk=512) == Capacity(block, 0, 0, 0, 63 * block)


def test_layers_with_a_window_keep_no_more_than_it_needs() -> None:
    """Gemma 3 270M: six groups of three layers, five of which keep 512 tokens and the chunk in work."""
    groups = KvGroups.of([*[WindowRule(512)] * 5, FULL] * 3)
    held = capacity(GIB, per_layer=1024, groups=groups, block_size=16, max_model_len=32768, chunk=512)
    needed = 32768 // 16 + 5 * (-(-(511 + 512) // 16) + 1)
    block = 3 * 16 * 1024
    assert held == Capacity(
        block, GIB // block, GIB // block // 6 * 16, GIB // block // needed, needed * block
    )


def test_where_attention_costs_as_much_as_the_weights(smollm2: Path) -> None:
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    norms = 30 * 2 * 576 + 576
    assert attention_doubling(read_config(smollm2)) == (30 * layer + norms) / (2 * 30 * 9 * 64)

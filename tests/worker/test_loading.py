from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from decodefleet.worker.assets.checkpoint import read_config
from decodefleet.worker.assets.plan import capacity, kv_bytes_per_token, kv_groups
from decodefleet.worker.config import CacheConfig, EngineConfig, KvCacheDtype, ModelConfig, RunnerConfig
from decodefleet.worker.loading import LoadedModel, load


def loaded(
    folder: Path,
    kv_cache_dtype: KvCacheDtype,
    *,
    gib: float = 0.01,
    load_format: Literal["auto", "dummy"] = "auto",
) -> LoadedModel:
    config = EngineConfig(
        model=ModelConfig(folder=folder, served_name="tiny", load_format=load_format),
        cache=CacheConfig(cpu_kv_cache_gib=gib, kv_cache_dtype=kv_cache_dtype),
        runner=RunnerConfig(device="cpu", threads=1),
    )
    return load(config, lambda *_: None)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_quantised_cache_has_more_blocks_and_other_hashes(
    tiny_llama: Path, kv_cache_dtype: KvCacheDtype
) -> None:
    plain, quantised = loaded(tiny_llama, "auto"), loaded(tiny_llama, kv_cache_dtype)
    # keys and values of 32 numbers: 64 bytes, or 32 and a scale
    assert plain.card.kv_bytes_per_token == 2 * 2 * 64
    assert quantised.card.kv_bytes_per_token == 2 * 2 * (32 + 4)
    budget = int(0.01 * (1 << 30))
    assert quantised.blocks == budget // (16 * quantised.card.kv_bytes_per_token)
    # one more, where the rows that pad a batch write
    assert quantised.runner.kv.slabs.nbytes == (quantised.blocks + 1) * 16 * quantised.card.kv_bytes_per_token
    assert quantised.card.hash_root != plain.card.hash_root


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("model", ["smollm2", "gemma3_270m"])
def test_what_is_allocated_is_what_was_planned(
    request: pytest.FixtureRequest, model: str, kv_cache_dtype: KvCacheDtype
) -> None:
    """Of the real models' shapes; weights do not matter here."""
    folder: Path = request.getfixturevalue(model)
    held = loaded(folder, kv_cache_dtype, gib=0.1, load_format="dummy")
    info = read_config(folder)
    per_token = kv_bytes_per_token(info, 2, kv_cache_dtype=kv_cache_dtype)
    limit = held.card.max_model_len
    planned = capacity(int(0.1 * (1 << 30)), per_token // info.layers, kv_groups(info), 16, limit, 512)
    assert held.blocks == planned.blocks
    assert held.runner.kv.slabs.nbytes == (planned.blocks + 1) * planned.block_bytes
    assert held.card.kv_bytes_per_token == per_token

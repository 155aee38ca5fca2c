from __future__ import annotations

from pathlib import Path

import pytest

from decodefleet.worker.config import CacheConfig, EngineConfig, KvCacheDtype, ModelConfig, RunnerConfig
from decodefleet.worker.loading import LoadedModel, load


def loaded(folder: Path, kv_cache_dtype: KvCacheDtype) -> LoadedModel:
    config = EngineConfig(
        model=ModelConfig(folder=folder, served_name="tiny"),
        cache=CacheConfig(cpu_kv_cache_gib=0.01, kv_cache_dtype=kv_cache_dtype),
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

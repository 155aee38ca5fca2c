from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from decodefleet.cluster.plan_view import (
    GIB,
    PlanOptions,
    advice,
    find_model,
    make_plan,
    measured,
    plan_table,
)
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.progress import NoProgress
from decodefleet.worker.config import CacheConfig, KvCacheDtype, ModelOptions

# Llama 3.1 8B
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
PARAMETERS = 8_030_261_248


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return tmp_path


def test_a_bare_config_is_enough(llama: Path) -> None:
    assert find_model(str(llama / "config.json"), NoProgress()) == llama
    plan = make_plan(find_model(str(llama), NoProgress()), PlanOptions(gpu_memory_gib=80))
    assert plan.parameters == PARAMETERS
    assert (plan.weights, plan.weights_exact) == (2 * PARAMETERS, False)
    # 2 MiB per block of 16 tokens
    assert plan.kv_per_token * 16 == 2 << 20
    assert plan.kv_pool == int(0.9 * 80 * GIB) - 2 * PARAMETERS
    assert plan.capacity.blocks == plan.kv_pool // (2 << 20)
    assert plan.capacity.sequences == plan.capacity.blocks // (131072 // 16)
    assert plan.fits


def test_ranks_share_weights_and_heads(llama: Path) -> None:
    plan = make_plan(llama, PlanOptions(gpu_memory_gib=80, tensor_parallel_size=4))
    assert plan.weights == PARAMETERS // 2
    assert plan.kv_per_token == 131072 // 4
    tiers = CacheConfig(cpu_kv_gib=64)
    (tier,) = make_plan(llama, PlanOptions(gpu_memory_gib=80, tensor_parallel_size=4, cache=tiers)).below
    assert (tier.size // GIB, tier.held.blocks) == (16, 64 * GIB // (2 << 20)), (
        "memory is shared, blocks are cut"
    )
    with pytest.raises(ModelError, match="cannot be divided among 3 ranks"):
        make_plan(llama, PlanOptions(gpu_memory_gib=80, tensor_parallel_size=3))


def test_dtype_and_length_can_be_chosen(llama: Path) -> None:
    plan = make_plan(llama, PlanOptions(ModelOptions(dtype="float32", max_model_len=1024), gpu_memory_gib=80))
    assert plan.kv_per_token == 2 * 131072
    assert plan.weights == 4 * PARAMETERS
    assert plan.max_model_len == 1024
    (llama / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "fp4"}), encoding="utf-8")
    with pytest.raises(ModelError, match="fp4 are not supported"):
        make_plan(llama, PlanOptions())


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_quantised_cache_holds_nearly_twice_as_much(llama: Path, kv_cache_dtype: KvCacheDtype) -> None:
    plain = make_plan(llama, PlanOptions(gpu_memory_gib=80))
    plan = make_plan(llama, PlanOptions(gpu_memory_gib=80, cache=CacheConfig(kv_cache_dtype=kv_cache_dtype)))
    # a scale of 4 bytes beside 128 numbers of one byte instead of two
    assert plan.kv_per_token == plain.kv_per_token * (128 + 4) // 256
    assert plan.capacity.blocks == plan.kv_pool // (plan.kv_per_token * 16) > 1.93 * plain.capacity.blocks


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (PlanOptions(gpu_memory_gib=16), "The weights alone do not fit"),
        (PlanOptions(gpu_memory_gib=24), "lower --max-model-len"),
    ],
)
def test_what_does_not_fit_is_said(llama: Path, options: PlanOptions, hint: str) -> None:
    plan = make_plan(llama, options)
    assert not plan.fits
    assert hint in advice(plan)


def test_stored_weights_are_counted_from_their_files(smollm2: Path) -> None:
    plan = make_plan(smollm2, PlanOptions(gpu_memory_gib=1))
    assert plan.weights_exact
    assert plan.weights == 2 * plan.parameters
    assert plan.kv_per_token == 23_040


def test_table_names_every_number(llama: Path) -> None:
    options = PlanOptions(
        gpu_memory_gib=80, tensor_parallel_size=2, cache=CacheConfig(gpu_memory_utilization=0.5)
    )
    console = Console(width=100)
    with console.capture() as captured:
        console.print(plan_table("llama", make_plan(llama, options)))
    text = captured.get()
    for expected in ("8,030.3 M", "7.48 GiB", "65,536 bytes", "1.00 MiB (16 tokens)", "40.00 GiB per rank"):
        assert expected in text


def test_tiers_below_are_shown_with_what_they_hold(llama: Path) -> None:
    cache = CacheConfig(
        cpu_kv_gib=64, nvme_kv_path=Path("/somewhere"), nvme_kv_gib=500, kv_cache_dtype="int8"
    )
    plan = make_plan(llama, PlanOptions(gpu_memory_gib=80, cache=cache))
    block = plan.kv_per_token * 16
    assert [(tier.size // GIB, tier.held.blocks) for tier in plan.below] == [
        (64, 64 * GIB // block),
        (500, 500 * GIB // block),
    ]
    console = Console(width=100)
    with console.capture() as captured:
        console.print(plan_table("llama", plan))
    text = captured.get()
    assert f"64.00 GiB (--cpu-kv-gib): {64 * GIB // block:,} blocks" in text
    assert "--nvme-kv-gib" in text
    assert make_plan(llama, PlanOptions(cache=CacheConfig(nvme_kv_gib=500))).below == ()


@dataclass(frozen=True)
class Published:
    """tp: ranks it is usually served on. kv_heads: of one rank. parameters: as published."""

    config: str
    tp: int
    layers: int
    kv_heads: int
    head_dim: int
    parameters: int


# config files as published by the makers
PUBLISHED = [
    Published("llama-3-8b", 1, 32, 8, 128, 8_030_261_248),
    Published("llama-3-70b", 8, 80, 1, 128, 70_553_706_496),
    Published("qwen3-32b", 1, 64, 8, 128, 32_762_123_264),
    Published("mistral-7b", 1, 32, 8, 128, 7_241_732_096),
]


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.config)
def test_published_models(model: Published) -> None:
    file = Path(__file__).parent / "published_configs" / model.config / "config.json"
    options = PlanOptions(gpu_memory_gib=141, tensor_parallel_size=model.tp)
    plan = make_plan(find_model(str(file), NoProgress()), options)
    assert plan.kv_per_token == 2 * model.layers * model.kv_heads * model.head_dim * 2
    assert plan.parameters == pytest.approx(model.parameters, rel=1e-3)
    quantised = PlanOptions(
        gpu_memory_gib=141, tensor_parallel_size=model.tp, cache=CacheConfig(kv_cache_dtype="fp8")
    )
    scaled = make_plan(file.parent, quantised)
    assert scaled.kv_per_token == 2 * model.layers * model.kv_heads * (model.head_dim + 4)


def test_the_way_back_from_the_tiers_is_measured(llama: Path, tmp_path: Path) -> None:
    cache = CacheConfig(cpu_kv_gib=1, nvme_kv_path=tmp_path)
    plan = measured(make_plan(llama, PlanOptions(cache=cache)), cache)
    # on a CPU both are this machine's; to a GPU memory has a bus between
    kinds = [float, float] if plan.usable is None else [type(None), float]
    assert [type(tier.speed) for tier in plan.below] == kinds
    unusable = CacheConfig(nvme_kv_path=Path("/proc/self/kv"))
    (tier,) = measured(make_plan(llama, PlanOptions(gpu_memory_gib=80, cache=unusable)), unusable).below
    assert str(tier.speed).startswith("cannot be used")
    memory = CacheConfig(cpu_kv_gib=1)
    (tier,) = measured(make_plan(llama, PlanOptions(gpu_memory_gib=80, cache=memory)), memory).below
    assert tier.speed is None

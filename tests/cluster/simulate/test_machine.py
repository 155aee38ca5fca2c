"""Machines from data sheets, worked out by hand for one, and what cannot be."""

from pathlib import Path

import pytest

from decodefleet.cluster.simulate.machine import (
    GPUS,
    MODELS,
    MachineError,
    StepCost,
    derive,
    gpu,
    model_shape,
    read_step_cost,
)

CONFIGS = Path(__file__).parents[1] / "published_configs"


def test_llama_8b_on_an_h100():
    machine = derive(GPUS["h100"], MODELS["llama-3-8b"], 1)
    # 16 GFLOP per token at half of 989 TFLOP/s; 128 KiB per token and 16 GB of weights at 2.5 TB/s
    assert machine.step.prefill_token == pytest.approx(32.5e-6, rel=0.01)
    assert machine.step.kv_token == pytest.approx(52.2e-9, rel=0.01)
    assert machine.step.base == pytest.approx(1.5e-3 + 6.4e-3, rel=0.01)
    # 524,288 FLOP per token and token before it
    assert machine.step.attention == pytest.approx(1.06e-9, rel=0.01)
    assert machine.kv_tokens == pytest.approx(411_000, rel=0.01)


def test_more_gpus_are_faster_and_hold_more():
    one, eight = (derive(GPUS["h100"], MODELS["llama-3-8b"], ranks) for ranks in (1, 8))
    assert eight.step.prefill_token == pytest.approx(one.step.prefill_token / 8)
    assert one.step.base / 8 < eight.step.base < one.step.base
    assert eight.kv_tokens > 8 * one.kv_tokens


def test_weights_that_do_not_fit():
    with pytest.raises(MachineError, match="tensor-parallel-size"):
        derive(GPUS["h100"], MODELS["llama-3-70b"], 1)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "qwen3-32b"])
def test_presets_are_what_published_configs_say(name):
    preset, read = MODELS[name], model_shape(str(CONFIGS / name))
    assert preset.parameters == pytest.approx(read.parameters, rel=0.005)
    assert (preset.layers, preset.hidden, preset.kv_bytes) == (read.layers, read.hidden, read.kv_bytes)


def test_unknown_names():
    with pytest.raises(MachineError, match="llama-3-70b"):
        model_shape("llama-9")
    with pytest.raises(MachineError, match="h200"):
        gpu("h900")


def test_coefficients_from_a_file(tmp_path):
    path = tmp_path / "step.json"
    path.write_text('{"base": 0.01, "prefill_token": 1e-4, "kv_token": 0, "sequence": 2e-4}')
    assert read_step_cost(path) == StepCost(0.01, 1e-4, 0, 2e-4)
    path.write_text('{"base": 0.01, "typo": 1}')
    with pytest.raises(MachineError, match="typo"):
        read_step_cost(path)
    with pytest.raises(MachineError, match="cannot read"):
        read_step_cost(tmp_path / "none.json")

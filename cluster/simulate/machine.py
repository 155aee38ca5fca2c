"""What a simulated worker is made of: how long its steps take and how many tokens of KV it holds.

Derived from a GPU's data sheet and a model's shape, or given as coefficients of a real run. Pure arithmetic.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from decodefleet.worker.assets.checkpoint import read_config
from decodefleet.worker.assets.plan import kv_bytes_per_token, parameters
from decodefleet.worker.protocol import StepTime

DTYPE_BYTES = 2
# of peaks, what good kernels reach: matrix products in prefill, reading memory in decode
MATMUL_SHARE, BANDWIDTH_SHARE = 0.5, 0.75
# of a GPU's memory; activations and graphs take some more of it
MEMORY_SHARE, ACTIVATIONS = 0.9, 2e9
# of each step: planning, launching, sampling; and what each sequence adds to them
STEP_S, SEQUENCE_S = 1.5e-3, 1e-5
# two sums over the ranks per layer
SUM_S = 8e-6


class MachineError(ValueError):
    """A machine that cannot be simulated; the message says what to change."""


class Gpu(NamedTuple):
    """Peak values: bytes, bytes per second, dense 16-bit FLOP per second."""

    memory: float
    bytes_per_s: float
    flops: float


class ModelShape(NamedTuple):
    """kv_bytes: of one token in all layers, on all ranks together. hidden: heads · head size."""

    parameters: float
    layers: int
    hidden: int
    kv_bytes: int


GPUS = {
    "a100": Gpu(80e9, 2.04e12, 312e12),
    "h100": Gpu(80e9, 3.35e12, 989e12),
    "h200": Gpu(141e9, 4.8e12, 989e12),
    "b200": Gpu(180e9, 8e12, 2250e12),
}

MODELS = {
    "llama-3-8b": ModelShape(8.03e9, 32, 4096, 131_072),
    "llama-3-70b": ModelShape(70.6e9, 80, 8192, 327_680),
    "qwen3-32b": ModelShape(32.8e9, 64, 8192, 262_144),
}


class StepCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """True seconds of one step; the scheduler is told only what is fitted to them.

    base + prefill_token · prefill tokens + kv_token · tokens of context read + sequence · decodes
    + attention · (prefill token, token before it) pairs
    """

    base: float
    prefill_token: float
    kv_token: float
    sequence: float
    attention: float = 0.0

    @property
    def linear(self) -> StepTime:
        """Without the pairs: what is known before the first step."""
        return StepTime(
            base=self.base,
            prefill_token=self.prefill_token,
            kv_token=self.kv_token,
            sequence=self.sequence,
        )


class Machine(NamedTuple):
    """One worker's. kv_tokens: the pool's size. kv_bytes: per token."""

    step: StepCost
    kv_tokens: int
    kv_bytes: int


def derive(gpu: Gpu, model: ModelShape, ranks: int) -> Machine:
    """From peaks and what is usually reached of them. Raises MachineError where the weights do not fit."""
    weights = model.parameters * DTYPE_BYTES
    room = ranks * (gpu.memory * MEMORY_SHARE - ACTIVATIONS) - weights
    if room < 4096 * model.kv_bytes:
        raise MachineError(
            f"{weights / 1e9:.0f} GB of weights leave no room for KV on {ranks} GPU(s) of "
            f"{gpu.memory / 1e9:.0f} GB: raise --tensor-parallel-size"
        )
    bandwidth = ranks * gpu.bytes_per_s * BANDWIDTH_SHARE
    flops = ranks * gpu.flops * MATMUL_SHARE
    step = StepCost(
        base=STEP_S + weights / bandwidth + (2 * model.layers * SUM_S if ranks > 1 else 0.0),
        prefill_token=2 * model.parameters / flops,
        kv_token=model.kv_bytes / bandwidth,
        sequence=SEQUENCE_S,
        attention=4 * model.layers * model.hidden / flops,
    )
    return Machine(step, int(room / model.kv_bytes), model.kv_bytes)


def model_shape(name: str) -> ModelShape:
    """A preset, or a folder with config.json. Raises MachineError, ModelError."""
    if name in MODELS:
        return MODELS[name]
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise MachineError(f"--model {name} is neither a folder with config.json nor one of {_list(MODELS)}")
    info = read_config(folder)
    return ModelShape(
        parameters(info), info.layers, info.heads * info.head_dim, kv_bytes_per_token(info, DTYPE_BYTES)
    )


def gpu(name: str) -> Gpu:
    """Raises MachineError."""
    if name not in GPUS:
        raise MachineError(f"--gpu {name} is none of {_list(GPUS)}")
    return GPUS[name]


def read_step_cost(path: Path) -> StepCost:
    """Coefficients from a JSON file with StepCost's fields, in seconds. Raises MachineError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepCost)
    except OSError as error:
        raise MachineError(f"--step-time: cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise MachineError(f"--step-time: {path}: {error}") from error


def _list(names: dict[str, Gpu] | dict[str, ModelShape]) -> str:
    return ", ".join(names)

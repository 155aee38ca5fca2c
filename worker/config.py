"""What a worker is told at its start: frozen, complete, checked once. Torch-free.

The control plane builds a `WorkerConfig` and hands it to the rank process as JSON. Values that depend on the
machine are None here and resolved by the engine, which makes new objects and never writes into these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
KvCacheDtype = Literal["auto", "fp8", "int8"]
RestorePolicy = Literal["auto", "always"]

EvictionPolicyName = Literal["lru", "cost"]


class Frozen(BaseModel):
    """Frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelOptions(Frozen):
    """How weights are read and computed with, whichever they are."""

    dtype: Dtype = Field(
        "auto", description="number format of weights and activations; auto is the checkpoint's"
    )
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8 rounds the weights of linear layers at load, with a scale per output"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="most tokens of prompt plus output; the model's own limit if not given"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy makes random weights of the right shapes, for benchmarks"
    )


class ModelConfig(ModelOptions):
    """Which weights."""

    folder: Path = Field(
        description="local folder in Hugging Face form: config.json, safetensors, tokenizer.json"
    )
    served_name: str = Field(description="the name by which requests ask for it")


class CacheConfig(Frozen):
    """The paged KV cache."""

    block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    num_gpu_blocks_override: int | None = Field(
        None, ge=1, description="blocks in the pool, on CPU too; what fits the memory if not given"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory for weights, activations and KV together"
    )
    cpu_kv_cache_gib: float = Field(
        1.0, gt=0, description="size of the block pool where there is no GPU, in GiB"
    )
    kv_cache_dtype: KvCacheDtype = Field(
        "auto", description="number format of cached K and V; fp8 and int8 hold nearly twice as many tokens"
    )
    window: int | None = Field(
        None,
        ge=1,
        description="keep so many last tokens in sight, generate without a limit of length; all if not given",
    )
    attention_sinks: int = Field(
        0, ge=0, description="first tokens that stay in sight beside --window (StreamingLLM; 4 is usual)"
    )
    enable_prefix_caching: bool = Field(True, description="share full blocks between equal prefixes")
    eviction_policy: EvictionPolicyName = Field(
        "lru",
        description="which cached block goes first: the one unused longest, or by cost the one that is least "
        "likely needed again soon, times what computing it would take",
    )
    cpu_kv_gib: float = Field(
        0.0,
        ge=0,
        description="host memory per worker (all its ranks) for KV blocks that leave the main pool, in GiB",
    )
    nvme_kv_path: Path | None = Field(
        None, description="folder on a fast disk for KV blocks; they survive a restart of the worker"
    )
    nvme_kv_gib: float = Field(
        32.0, gt=0, description="disk space per worker (all its ranks) in that folder, in GiB"
    )
    kv_restore: RestorePolicy = Field(
        "auto",
        description="auto brings blocks back from memory or disk where that is faster than computing them",
    )

    kv_peer_fetch: Literal["auto", "off"] = Field(
        "auto",
        description="auto fetches prefixes from other workers' memory where that beats computing them",
    )
    kv_peer_gbps: float = Field(
        10.0,
        gt=0,
        description="Gbit/s at which a worker gives KV away at most; what is expected until it is measured",
    )

    @model_validator(mode="after")
    def _tiers_hold_what_has_a_name(self) -> Self:
        if not self.enable_prefix_caching and (self.cpu_kv_gib or self.nvme_kv_path is not None):
            raise ValueError("cpu_kv_gib and nvme_kv_path need enable_prefix_caching")
        return self

    @model_validator(mode="after")
    def _sinks_need_a_window(self) -> Self:
        if self.attention_sinks and self.window is None:
            raise ValueError("attention_sinks need a window")
        return self


class BatchConfig(Frozen):
    """What one engine step may hold."""

    max_num_seqs: int = Field(64, ge=1, description="most sequences running at once")
    max_num_batched_tokens: int = Field(
        512, ge=1, description="token budget of one step: decodes first, then prefill chunks"
    )
    itl_target_ms: float = Field(
        75.0,
        ge=0,
        description="longest a step should take: prefill beside decodes is cut to fit; 0 never cuts",
    )
    max_waiting: int = Field(1024, ge=1, description="requests that may wait in the worker before it refuses")


class RunnerConfig(Frozen):
    """Where and how a step is computed."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one")
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="GPUs of one machine that share a model (without GPUs: processes)"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; decided from the cores if not given")
    batch_invariant: bool | None = Field(
        None,
        description="same tokens bit for bit whatever else is in the batch; if not given on for CPU only",
    )
    enforce_eager: bool | None = Field(
        None,
        description="run decode steps without recorded graphs; if not given they are used where possible",
    )
    async_scheduling: bool | None = Field(
        None, description="plan the next step while one runs; if not given done on CUDA only"
    )


class EngineConfig(Frozen):
    """One model replica."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    batch: BatchConfig = BatchConfig()
    runner: RunnerConfig = RunnerConfig()


class FollowerConfig(Frozen):
    """What rank 0 of a model tells each of the others at its start."""

    engine: EngineConfig
    rank: int = Field(ge=1, description="of engine.runner.tensor_parallel_size")
    max_len: int = Field(ge=1, description="tokens of a sequence at most")
    store: Path = Field(description="file by which the ranks find each other, open in all of them")
    exchange: int | None = Field(
        None, description="descriptor of the memory in which they add up numbers; None for a process group"
    )


class FakeConfig(Frozen):
    """A worker that speaks the protocol and keeps real block accounts, but computes nothing (`fake.py`)."""

    step_base_s: float = Field(0.005, ge=0, description="time of an empty step")
    prefill_token_s: float = Field(0.0, ge=0, description="time per prompt token")
    sequence_s: float = Field(0.0, ge=0, description="time per decoding sequence")
    total_blocks: int = Field(4096, ge=1, description="size of the pretended block pool")
    hang_after: int | None = Field(None, ge=0, description="steps after which one never ends")


class WorkerConfig(Frozen):
    """Everything a rank process is started with; secrets come by environment instead."""

    worker_id: str = Field(description="unique in the cluster, the same after a restart")
    engine: EngineConfig
    bind: str = Field("tcp://127.0.0.1:0", description="where routers reach this worker")
    advertise_host: str | None = Field(None, description="host told to others; the bound one if not given")
    supervisor: str | None = Field(None, description="endpoint of the supervising process")
    heartbeat_s: float = Field(0.25, gt=0, description="interval of reports to the scheduler")
    scheduler_timeout_s: float = Field(3.0, gt=0, description="silence that counts as loss")
    fake: FakeConfig | None = None

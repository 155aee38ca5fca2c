"""`decodefleet plan`: what a model takes of a machine's memory, and what fits. Torch-free.

The arithmetic is `worker.assets.plan`'s, which the engine uses too; this module finds the numbers it needs
and lays them out.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.table import Table

from decodefleet.worker.assets.checkpoint import ModelInfo, read_config, weight_bytes
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.plan import (
    SCALE_BYTES,
    Capacity,
    capacity,
    kv_bytes_per_token,
    kv_groups,
    parameters,
)
from decodefleet.worker.assets.progress import ProgressSink
from decodefleet.worker.assets.quantised import weight_format
from decodefleet.worker.assets.resolve import resolve_model
from decodefleet.worker.assets.speed import disk_bytes_per_s, memory_bytes_per_s
from decodefleet.worker.config import BatchConfig, CacheConfig, ModelOptions

GIB = 1 << 30
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class PlanOptions:
    """gpu_memory_gib: of one GPU; None takes this machine's, or without a GPU the CPU's pool."""

    weights: ModelOptions = field(default_factory=ModelOptions)
    tensor_parallel_size: int = 1
    gpu_memory_gib: float | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)


class Below(NamedTuple):
    """A tier of KV memory beneath the main pool. size: of each rank's part. speed: of the way back if known,
    or what is wrong."""

    label: str
    option: str
    size: int
    held: Capacity
    speed: float | str | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, each per rank unless it says otherwise.

    weights_exact: read from the weight files; False: counted from the config.
    block_layers: layers that share a block; fewer than there are where some have a window.
    usable: what weights and KV may take together; None on a CPU, whose pool has a fixed size.
    below: tiers beneath the pool, fastest first.
    """

    info: ModelInfo
    dtype: str
    ranks: int
    max_model_len: int
    block_size: int
    parameters: int
    weights: int
    weights_exact: bool
    kv_dtype: str
    kv_per_token: int
    place: str
    usable: int | None
    kv_pool: int
    block_layers: int
    capacity: Capacity
    below: tuple[Below, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether at least one sequence of the full length can be served."""
        return self.capacity.sequences > 0


def find_model(model: str, progress: ProgressSink) -> Path:
    """The folder of a model, or of a bare config.json. Raises ModelError."""
    path = Path(model).expanduser()
    return (
        path.parent
        if path.name == "config.json" and path.is_file()
        else resolve_model(model, progress=progress).folder
    )


def make_plan(folder: Path, options: PlanOptions) -> MemoryPlan:
    """Raises ModelError when the config is unusable or heads cannot be divided among the ranks."""
    info, wanted = read_config(folder), options.weights.dtype
    dtype = (info.dtype or "bfloat16") if wanted == "auto" else wanted
    if dtype not in DTYPE_BYTES:
        raise ModelError(
            f"Weights in {dtype} are not supported.", f"Choose --dtype: {', '.join(DTYPE_BYTES)}."
        )
    ranks, size = options.tensor_parallel_size, DTYPE_BYTES[dtype]
    cache, block = options.cache, options.cache.block_size
    per_token = kv_bytes_per_token(info, size, ranks, cache.kv_cache_dtype)
    # quantised checkpoints are widened while they load
    as_stored = wanted == "auto" and weight_format(info.raw) is None
    stored = _stored_weights(folder) if as_stored else None
    weights = -(-(stored or parameters(info) * size) // ranks)
    place, usable = _memory(options)
    pool = max(0, usable - weights) if usable is not None else int(cache.cpu_kv_cache_gib * GIB)
    length = options.weights.max_model_len or info.max_position_embeddings
    groups = kv_groups(info, cache.window, cache.attention_sinks)

    def held(memory: int) -> Capacity:
        chunk = options.batch.max_num_batched_tokens
        return capacity(memory, per_token // info.layers, groups, block, length, chunk)

    return MemoryPlan(
        info=info,
        dtype=dtype,
        ranks=ranks,
        max_model_len=length,
        block_size=block,
        parameters=parameters(info),
        weights=weights,
        weights_exact=stored is not None,
        kv_dtype=dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype,
        kv_per_token=per_token,
        place=place,
        usable=usable,
        kv_pool=pool,
        block_layers=groups.block_layers,
        capacity=held(pool),
        below=tuple(
            Below(label, option, size // ranks, held(size // ranks))
            for label, option, size in _tiers(cache)
            if size
        ),
    )


def measured(plan: MemoryPlan, cache: CacheConfig) -> MemoryPlan:
    """The plan with the tiers' speeds: of the disk, and of memory where no bus lies before the pool."""
    speeds: list[float | str | None] = []
    for tier in plan.below:
        if tier.option != "--nvme-kv-gib":
            speeds.append(memory_bytes_per_s() if plan.usable is None else None)
        elif cache.nvme_kv_path is not None:
            try:
                speeds.append(disk_bytes_per_s(cache.nvme_kv_path))
            except OSError as error:
                speeds.append(f"cannot be used: {error}")
    below = [tier._replace(speed=speed) for tier, speed in zip(plan.below, speeds, strict=True)]
    return replace(plan, below=tuple(below))


def _tiers(cache: CacheConfig) -> tuple[tuple[str, str, int], ...]:
    disk = cache.nvme_kv_gib if cache.nvme_kv_path is not None else 0
    return (
        ("host memory below", "--cpu-kv-gib", int(cache.cpu_kv_gib * GIB)),
        ("disk below", "--nvme-kv-gib", int(disk * GIB)),
    )


def _stored_weights(folder: Path) -> int | None:
    try:
        return weight_bytes(folder)
    except ModelError:
        return None


def _memory(options: PlanOptions) -> tuple[str, int | None]:
    share = options.cache.gpu_memory_utilization
    gib = options.gpu_memory_gib
    name = "a GPU"
    if gib is None:
        found = _first_gpu()
        if found is None:
            return f"CPU with {psutil.virtual_memory().total / GIB:.0f} GiB", None
        name, gib = found
    return f"{name} with {gib:.4g} GiB, of which {share:.0%}", int(gib * GIB * share)


def _first_gpu() -> tuple[str, float] | None:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        name, mebibytes = listing.splitlines()[0].rsplit(",", 1)
        return name.strip(), float(mebibytes) / 1024
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def plan_table(title: str, plan: MemoryPlan) -> Table:
    """The plan for people."""
    grid = Table(title=title, title_justify="left", show_header=False)
    grid.add_column(style="bold")
    grid.add_column()
    for label, value in (*_model_rows(plan), *_memory_rows(plan)):
        grid.add_row(label, value)
    return grid


def _model_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    info = plan.info
    heads = f"{info.heads} heads of {info.head_dim}, {info.kv_heads} for KV"
    source = "from the weight files" if plan.weights_exact else "counted from the config"
    return [
        ("model", f"{info.architecture}: {info.layers} layers, {heads}"),
        ("parameters", f"{plan.parameters / 1e6:,.1f} M in {plan.dtype}"),
        (_per_rank("weights", plan), f"{_bytes(plan.weights)} ({source})"),
        (
            _per_rank("KV per token", plan),
            f"{plan.kv_per_token:,} bytes = {_kv_formula(plan)}",
        ),
        (
            _per_rank("KV per block", plan),
            f"{_bytes(plan.capacity.block_bytes)} ({plan.block_size} tokens{_of_layers(plan)})",
        ),
        (
            _per_rank("KV of a full sequence", plan),
            f"{_bytes(plan.capacity.sequence_bytes)} ({plan.max_model_len:,} tokens)",
        ),
    ]


def _of_layers(plan: MemoryPlan) -> str:
    layers = plan.block_layers
    return "" if layers == plan.info.layers else f" of {layers} layers: some have a window"


def _kv_formula(plan: MemoryPlan) -> str:
    size = DTYPE_BYTES.get(plan.kv_dtype)
    vector = f"head size · {size}" if size else f"(head size + {SCALE_BYTES} for its scale)"
    return f"2 · layers · KV heads · {vector}, in {plan.kv_dtype}"


def _memory_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    held = plan.capacity
    note = "--cpu-kv-cache-gib" if plan.usable is None else "less what activations take"
    rows = [
        ("memory", plan.place if plan.usable is None else f"{plan.place}: {_bytes(plan.usable)} per rank"),
        (_per_rank("left for KV", plan), f"{_bytes(plan.kv_pool)} ({note})"),
        ("fits", f"{held.blocks:,} blocks = {held.tokens:,} tokens"),
        ("sequences at once", f"{held.sequences:,} of the full length"),
    ]
    rows += [
        (
            _per_rank(tier.label, plan),
            f"{_bytes(tier.size)} ({tier.option}): {tier.held.blocks:,} blocks = {tier.held.tokens:,} tokens"
            + _way_back(tier.speed, plan),
        )
        for tier in plan.below
    ]
    return rows if plan.ranks == 1 else [("ranks", str(plan.ranks)), *rows]


def _way_back(speed: float | str | None, plan: MemoryPlan) -> str:
    if not isinstance(speed, float):
        return "" if speed is None else f"; {speed}"
    milliseconds = 1e6 * plan.kv_per_token / speed
    return f"; 1,000 of them back in {milliseconds:.2g} ms ({speed / 1e9:.1f} GB/s, measured)"


def advice(plan: MemoryPlan) -> str:
    """What to do when the plan does not fit."""
    if plan.usable is None:
        return "Not one sequence of the full length fits: raise --cpu-kv-cache-gib or lower --max-model-len."
    if plan.kv_pool == 0:
        return "The weights alone do not fit: raise --tensor-parallel-size, or take larger GPUs."
    return "Not one sequence of the full length fits: lower --max-model-len or raise --tensor-parallel-size."


def _per_rank(label: str, plan: MemoryPlan) -> str:
    return label if plan.ranks == 1 else f"{label}, each rank"


def _bytes(size: int) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} bytes"

"""From a configuration to a loaded, warm model: what fits is decided here, once, before requests come.

Errors say what is missing and what to do. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import psutil
import torch

from decodefleet.kernels import ops

from .assets.checkpoint import ModelInfo, fingerprint, read_config, stored_values
from .assets.errors import ModelError
from .assets.quantised import weight_format
from .batcher import StepPlan
from .config import EngineConfig
from .engine_api import Progress
from .kv.hashing import hash_root
from .layers.frequencies import frequencies_name
from .parallel.gang import Gang, OnLoss, ignore_loss
from .parallel.shard import Shard
from .protocol import ModelCard, StepTime
from .runner.device import choose_device, choose_dtype
from .runner.model_runner import ModelRunner
from .runner.rehearsal import EVERYTHING, GREEDY, rehearsal
from .sampling_params import SamplingParams
from .step_time import StepTimeModel

log = logging.getLogger(__name__)

GIB = 1 << 30
# "max_model_len" of a model that generates without end, for which memory and angles set no limit
ENDLESS = (1 << 31) - 1
# set aside for each recorded decode graph: its nodes, and its share of the pool that all of them use
GRAPH_BYTES = 4 << 20


@dataclass(frozen=True)
class LoadedModel:
    """blocks: size of the KV pool, allocated in `runner.kv`."""

    info: ModelInfo
    runner: ModelRunner
    card: ModelCard
    blocks: int
    step_time: StepTimeModel


def load(config: EngineConfig, progress: Progress, on_loss: OnLoss = ignore_loss) -> LoadedModel:
    """Raises ModelError where the folder is broken, the architecture unknown, or memory too small."""
    info = read_config(config.model.folder)
    max_len = _model_len(config, info)
    _check_host_memory(config, info)
    gang = _gang(config, info, max_len, on_loss)
    try:
        return _load(config, info, ModelRunner(config, info, max_len, progress, gang), max_len, progress)
    except BaseException:
        if gang is not None:
            gang.close()
        raise


def _load(
    config: EngineConfig, info: ModelInfo, runner: ModelRunner, max_len: int, progress: Progress
) -> LoadedModel:
    blocks = _pool_blocks(config, runner, max_len)
    max_len = _fit_length(config, runner, max_len, blocks)
    progress("allocating the KV cache", 0.0)
    runner.allocate_kv(blocks)
    runner.record_graphs(progress)
    progress("warming up", 0.0)
    step_time = _warm_up(config, runner, max_len)
    progress("warming up", 1.0)
    runner.settle()
    return LoadedModel(info, runner, _card(config, info, runner, max_len), blocks, step_time)


def _gang(config: EngineConfig, info: ModelInfo, max_len: int, on_loss: OnLoss) -> Gang | None:
    """The other ranks, coming to life. Raises ModelError where the model cannot be served by several."""
    ranks = config.runner.tensor_parallel_size
    if ranks == 1:
        return None
    Shard.of(info, 0, ranks)
    on_cpu = choose_device(config.runner.device).type == "cpu"
    return Gang(config, max_len, on_loss, ops.make_exchange(ranks) if on_cpu else None)


def _card(config: EngineConfig, info: ModelInfo, runner: ModelRunner, max_len: int) -> ModelCard:
    dummy, chunk = config.model.load_format == "dummy", config.batch.max_num_batched_tokens
    return ModelCard(
        name=config.model.served_name,
        folder=str(config.model.folder),
        max_model_len=max_len,
        vocab_size=info.vocab_size,
        block_size=config.cache.block_size,
        hash_root=hash_root(
            fingerprint="dummy" if dummy else fingerprint(config.model.folder),
            quantization=config.model.quantization,
            block_size=config.cache.block_size,
            attention=_attention(config, info, runner),
            kv_dtype=str(runner.rank.kv_dtype).removeprefix("torch."),
        ),
        kv_bytes_per_token=runner.block_bytes * len(runner.groups) // config.cache.block_size,
        eos_token_ids=info.eos_token_ids,
        batch_invariant=runner.rank.invariant,
        group_blocks=tuple(
            None if group.rule.window is None else group.rule.most_blocks(ENDLESS, runner.block_size, chunk)
            for group in runner.groups.groups
        ),
    )


def _attention(config: EngineConfig, info: ModelInfo, runner: ModelRunner) -> str:
    """Name of attention that is not the model's own, or of one of its two kinds: deeper layers' KV depends on
    what was in sight, keys on how they were turned."""
    cache = config.cache
    window = "" if cache.window is None else f"window {cache.window}, {cache.attention_sinks} sinks"
    return window + frequencies_name(info.rope, runner.rank.positions)


def _model_len(config: EngineConfig, info: ModelInfo) -> int:
    wanted, limit = config.model.max_model_len, info.max_position_embeddings
    if config.cache.window is not None:
        in_sight = config.cache.window + config.cache.attention_sinks
        if in_sight > limit:
            raise ModelError(
                f"Window and sinks put {in_sight} tokens in sight; the model was made for {limit}.",
                f"Pass --window and --attention-sinks of at most {limit} together.",
            )
        return wanted or ENDLESS
    if wanted is not None and wanted > limit:
        raise ModelError(
            f"--max-model-len {wanted} is more than the {limit} positions the model was made for.",
            f"Pass at most {limit}.",
        )
    return wanted or limit


def _check_host_memory(config: EngineConfig, info: ModelInfo) -> None:
    """Before anything is loaded, so that no process is killed for memory half-way."""
    below, free = config.cache.cpu_kv_gib, psutil.virtual_memory().available
    if below * GIB > free:
        raise ModelError(
            f"--cpu-kv-gib {below:g} is more than the {free / GIB:.1f} GiB of memory that are free.",
            "Pass less, or none.",
        )
    if choose_device(config.runner.device).type != "cpu" or config.model.load_format == "dummy":
        return
    form = weight_format(info.raw)
    values = stored_values(config.model.folder, 8 if form is None else form.bits)
    weights = values * choose_dtype(config.model.dtype, info).itemsize
    if weights > free:
        raise ModelError(
            f"The weights need {weights / GIB:.1f} GiB of memory and {free / GIB:.1f} GiB are free.",
            "Free memory, or serve a smaller model.",
        )


def _pool_blocks(config: EngineConfig, runner: ModelRunner, max_len: int) -> int:
    if config.cache.num_gpu_blocks_override is not None:
        return config.cache.num_gpu_blocks_override
    if runner.device.type == "cpu":
        budget, option = int(config.cache.cpu_kv_cache_gib * GIB), "--cpu-kv-cache-gib"
    else:
        budget, option = _gpu_budget(config, runner, max_len), "--gpu-memory-utilization"
    blocks = budget // runner.block_bytes
    if blocks < 1:
        raise ModelError(
            f"Memory for the KV cache ({budget / GIB:.2f} GiB) holds no block of {runner.block_bytes} bytes.",
            f"Raise {option}.",
        )
    return blocks


def _gpu_budget(config: EngineConfig, runner: ModelRunner, max_len: int) -> int:
    """What utilisation leaves beside weights, graphs, and the activations of a full step, measured by running
    one."""
    sequences = min(config.batch.max_num_seqs, config.batch.max_num_batched_tokens)
    each = min(config.batch.max_num_batched_tokens // sequences, max_len)
    plan = _rehearsal(runner, [each] * sequences, EVERYTHING)
    runner.allocate_kv(sum(len(own.ids) for chunk in plan.chunks for own in chunk.seq.blocks))
    torch.cuda.reset_peak_memory_stats()
    _run(runner, plan)
    peak = torch.cuda.max_memory_allocated() - runner.kv.slabs.nbytes
    runner.allocate_kv(blocks=0)
    free, total = torch.cuda.mem_get_info()
    foreign = total - free - torch.cuda.memory_reserved()
    graphs = len(runner.rank.buckets or ()) * GRAPH_BYTES
    return int(total * config.cache.gpu_memory_utilization) - peak - foreign - graphs - runner.block_bytes


def _fit_length(config: EngineConfig, runner: ModelRunner, max_len: int, blocks: int) -> int:
    """A single sequence must always fit the pool: that is what progress rests on."""
    chunk = config.batch.max_num_batched_tokens
    capacity = runner.groups.most_tokens(blocks, runner.block_size, chunk, limit=max_len)
    if capacity == max_len:
        return max_len
    if max_len == ENDLESS:
        needed = runner.groups.most_blocks(ENDLESS, runner.block_size, chunk)
        raise ModelError(
            f"--window {config.cache.window} takes {needed} KV blocks for a sequence; there are {blocks}.",
            "Give the KV cache more memory, or pass a smaller --window or --max-num-batched-tokens.",
        )
    if not capacity:
        raise ModelError(
            f"{blocks} KV blocks hold no sequence, which has a block in each of {len(runner.groups)} groups.",
            "Give the KV cache more memory.",
        )
    if config.model.max_model_len is not None:
        raise ModelError(
            f"--max-model-len {max_len} does not fit: the {blocks} KV blocks hold {capacity} tokens.",
            "Give the KV cache more memory, or pass a smaller --max-model-len.",
        )
    log.warning(
        "the KV cache holds %d tokens; max_model_len is %d instead of %d",
        capacity,
        capacity,
        max_len,
    )
    return capacity


def _warm_up(config: EngineConfig, runner: ModelRunner, max_len: int) -> StepTimeModel:
    """A prefill and a decode, twice: the first pays for allocation and lazy set-up, the second is timed."""
    most = min(config.batch.max_num_batched_tokens, max_len)
    if runner.device.type == "cuda":
        _compile(runner, most)
    tokens = min(64, most)
    for _ in range(2):
        prefill, decode = (_run(runner, _rehearsal(runner, [count])) for count in (tokens, 1))
    per_token = max(prefill - decode, 0.1 * prefill) / tokens
    prior = StepTime(
        base=decode, prefill_token=per_token, kv_token=decode * 1e-5, sequence=min(per_token, decode)
    )
    return StepTimeModel(prior)


def _compile(runner: ModelRunner, most: int) -> None:
    """Steps of all sizes, alone and beside a decode: a kernel's first call compiles it for seconds."""
    for size in (*(1 << i for i in range(most.bit_length())), most):
        for counts in ([size], [1, size - 1]) if size > 1 else ([1],):
            _run(runner, _rehearsal(runner, counts, EVERYTHING))


def _rehearsal(runner: ModelRunner, counts: list[int], params: SamplingParams = GREEDY) -> StepPlan:
    return rehearsal(counts, runner.block_size, len(runner.groups), params)


def _run(runner: ModelRunner, plan: StepPlan) -> float:
    """Seconds that a step takes."""
    began = time.perf_counter()
    runner.submit(plan).result()
    return time.perf_counter() - began

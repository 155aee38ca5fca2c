"""One rank's part of the model on its device: weights, KV cache, recordings; computes steps given as arrays.

All ranks of a model run the same steps in the same order. Knows nothing of sequences and plans, and not who
leads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from decodefleet.kernels import ops

from ..assets.checkpoint import ModelInfo
from ..assets.quantised import weight_format
from ..config import EngineConfig
from ..engine_api import Progress
from ..kv.groups import KvGroups, layer_rules
from ..layers.linear import LinearOptions
from ..models.quantised_weights import QuantisedWeights
from ..models.registry import has_family, model_class
from ..models.weights import CheckpointWeights, DummyWeights, Weights
from ..parallel.ranks import Ranks
from .batch import BatchArrays, ModelInput, as_input, empty_batch, pad_decode
from .buffers import Array, Staging
from .device import PATIENCE_S, choose_dtype, choose_kv_dtype, is_invariant, rank_device, set_threads
from .graphs import Bucket, Buckets, DecodeGraphs
from .step_arrays import StepArrays

log = logging.getLogger(__name__)

# in the staging buffer, beside what the model reads: sampling parameters of a row, and alignment
BYTES_PER_ROW = 256
STAGING_SLACK = 1024
# rows of logits held at once where prompts are scored
SCORED_ROWS = 64


class RankModel:
    """positions: that the model was made for, None for no limit.

    depth: steps in flight at most; with 2 the next is submitted before the last one's result is read.
    buckets: shapes of decode steps that are recorded as graphs; None where all steps run eagerly.
    widths: blocks of a sequence at most, in the table of each KV group.
    """

    def __init__(
        self, config: EngineConfig, info: ModelInfo, max_len: int, ranks: Ranks, progress: Progress
    ) -> None:
        options, cache = config.runner, config.cache
        self.device = rank_device(options, ranks.shard.rank)
        self.dtype = choose_dtype(config.model.dtype, info)
        self.block_size = cache.block_size
        on_gpu = self.device.type == "cuda"
        self.depth = 2 if _given(options.async_scheduling, on_gpu) else 1
        self.ranks = ranks
        own = has_family(info)
        # where our kernels do little of the work, torch has the threads
        set_threads(options, self.dtype if own else torch.float32)
        weights = _weights(config, info, self.dtype, self.device, progress)
        self.invariant = is_invariant(options) if own else bool(options.batch_invariant)
        linear = LinearOptions(self.invariant, config.model.quantization, ranks)
        self.groups = KvGroups.of(layer_rules(info.layer_windows, cache.window, cache.attention_sinks))
        self.positions = None if cache.window is not None else max_len
        view = ranks.shard.view(info)
        self.model = model_class(info)(view, self.groups, weights, self.positions, self.device, linear)
        self._hidden_size = info.hidden_size
        self.kv_dtype = choose_kv_dtype(cache.kv_cache_dtype, self.dtype)
        self.layout = ops.KvLayout(
            self.groups.block_layers, view.kv_heads, self.block_size, info.head_dim, self.kv_dtype
        )
        self.kv = self.layout.allocate(0, self.device)
        self._scratch_block = 0
        rows, chunk = config.batch.max_num_seqs, config.batch.max_num_batched_tokens
        self.widths = self.groups.most_entries(max_len, self.block_size, chunk)
        self._frames = sorted(set(self.groups.frames))
        recordable = own and ranks.recordable and ops.can_record(self.device, self.dtype)
        eager = _given(options.enforce_eager, not recordable) or not own
        self.buckets = None if eager else Buckets.up_to(rows, self._longest(max_len), exact=not on_gpu)
        # on the host nothing has to be packed but what a recording reads
        packed = 0 if eager and not on_gpu else self._staging_bytes(rows, chunk)
        self._staging = Staging(packed, self.device, depth=self.depth)
        self._graphs: DecodeGraphs | None = None
        self._samples_R: Tensor | None = None

    def allocate_kv(self, blocks: int) -> None:
        """Room for `blocks` blocks, and one more, where the rows that pad a batch write."""
        self.kv = self.layout.allocate(blocks + 1, self.device)
        self._scratch_block = blocks

    @torch.inference_mode()
    def record_graphs(self, progress: Progress) -> None:
        """Record the decode step in all its buckets, on the KV cache as allocated; nothing where steps run
        eagerly. On a CPU that is done as they come."""
        if self.buckets is None:
            return
        shape = (self.buckets.rows[-1], self._hidden_size)
        self._graphs = DecodeGraphs(
            self.buckets, self.forward, torch.empty(shape, dtype=self.dtype, device=self.device)
        )
        if self.device.type == "cpu":
            return
        for done, bucket in enumerate(self.buckets.descending()):
            progress("recording decode graphs", done / len(self.buckets))
            sent = self._staging.send(self.padded(empty_batch(self.groups), bucket).arrays)
            self._graphs.record(bucket, self._decode_input(sent, bucket))
        progress("recording decode graphs", 1.0)

    def settle(self) -> None:
        """Nothing takes long from here on, so that a rank that keeps the others waiting is lost."""
        self.ranks.set_patience(PATIENCE_S)

    def run(self, step: StepArrays, extras: Rows[Array] = ()) -> Ran:
        """Start the step up to its hidden states; `extras` travel to the device in the same copy."""
        arrays = step.batch.arrays
        own = [step.feed_2F, step.copies_2C, step.hidden_S]
        sent = self._staging.send([*arrays, *own, *extras])
        tensors, rest = sent[: len(arrays)], sent[len(arrays) :]
        feed_2F, copies_2C, hidden_S, *others = rest
        inputs = self._input(tensors, step)
        if copies_2C.numel():
            ops.copy_blocks(self.kv.slabs, *copies_2C.unbind())
        if self._samples_R is not None and feed_2F.numel():
            fed_F, sampled_F = feed_2F.unbind()
            inputs.tokens_T[fed_F] = self._samples_R[sampled_F]
        if self._graphs is None or step.bucket is None:
            hidden_TD = self.forward(inputs)
        else:
            hidden_TD = self._graphs.run(step.bucket, inputs, step.chunks)
            self.ranks.check()
        return Ran(hidden_TD, hidden_S, others)

    def scored_logits(self, step: StepArrays, ran: Ran) -> Iterator[Tensor]:
        """Logits of the rows of `scored_S2`, a span after the other, in pieces of SCORED_ROWS at most."""
        for first, count in step.scored_S2.tolist():
            for hidden in ran.hidden_TD[first : first + count].split(SCORED_ROWS):
                yield self.model.logits(hidden)

    def sampled_logits(self, ran: Ran) -> Tensor:
        """fp32 [S, vocabulary], on rank 0: of each sequence that a token is sampled for."""
        rows_S = ran.hidden_S
        return self.model.logits(ran.hidden_TD[rows_S] if rows_S.numel() else ran.hidden_TD)

    def take_samples(self, tokens_R: Tensor) -> None:
        """The step's samples, which the next one may have to be fed with: rank 0's, whoever calls."""
        # with one step at a time, the host knows them before the next
        if self.depth > 1:
            self._samples_R = tokens_R if self.ranks.shard.size == 1 else self.ranks.from_leader(tokens_R)

    def bucket_of(self, batch: BatchArrays, max_query: int) -> Bucket | None:
        """The recording that runs this batch; None for a step that has to run eagerly."""
        if self._graphs is None or max_query > 1:
            return None
        longest = max(batch.max_context[frame] for frame in self._frames)
        return self._graphs.buckets.smallest(batch.ids_NT.shape[1], longest)

    def padded(self, batch: BatchArrays, bucket: Bucket) -> BatchArrays:
        blocks = -(-bucket.context // self.block_size)
        widths = [min(width, blocks) for width in self.widths]
        return pad_decode(batch, bucket.rows, widths, scratch=self._scratch_block, block_size=self.block_size)

    def forward(self, inputs: ModelInput) -> Tensor:
        """Final hidden states [T, D]."""
        return self.model.forward(inputs.tokens_T, inputs.positions_T, self.kv, inputs.metas)

    def _input(self, tensors: list[Tensor], step: StepArrays) -> ModelInput:
        if step.bucket is not None:
            return self._decode_input(tensors, step.bucket)
        maxima, context = step.max_query, step.batch.max_context
        return as_input(tensors, self.groups, max_query=maxima, max_context=context, decodes=step.decodes)

    def _decode_input(self, tensors: list[Tensor], bucket: Bucket) -> ModelInput:
        limits = [self.widths[group] * self.block_size for group in self.groups.windowed]
        contexts = [bucket.context, *(min(bucket.context, limit) for limit in limits)]
        return as_input(tensors, self.groups, max_query=1, max_context=contexts, decodes=bucket.rows)

    def _longest(self, max_len: int) -> int:
        """Tokens that any group lists of one sequence at most."""
        return max(min(max_len, width * self.block_size) for width in self.widths)

    def _staging_bytes(self, rows: int, chunk: int) -> int:
        """Of the largest step: ids, positions and slots of its tokens; block tables; the rest by the row."""
        lists = 2 + len(self.groups.windowed) + len(self.groups)
        return 8 * lists * max(rows, chunk) + rows * (4 * sum(self.widths) + BYTES_PER_ROW) + STAGING_SLACK


@dataclass(frozen=True)
class Ran:
    """hidden_TD: final hidden states. hidden_S: rows of them to sample from, empty for all."""

    hidden_TD: Tensor
    hidden_S: Tensor
    extras: list[Tensor]


def _given(option: bool | None, default: bool) -> bool:
    return default if option is None else option


def _weights(
    config: EngineConfig, info: ModelInfo, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Weights:
    if config.model.load_format == "dummy":
        return DummyWeights(dtype, device)

    def on_bytes(read: int, total: int) -> None:
        progress("loading weights", read / max(total, 1))

    weights = CheckpointWeights(config.model.folder, dtype, device, on_bytes)
    form = weight_format(info.raw)
    if form is None:
        return weights
    log.info("weights are %s in the checkpoint, and widened to %s as they come", form.name, dtype)
    return QuantisedWeights(weights, form)

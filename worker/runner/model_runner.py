"""Holds the model and the KV cache on a device, and starts planned steps on them.

`submit(plan)` is the whole interface: copies, forward, sampling, in the order of submission and without
waiting for the device. Knows sequences only to read their tokens, blocks and parameters; never changes them.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decodefleet.kernels import ops

from ..assets.checkpoint import ModelInfo
from ..batcher import Chunk, StepPlan
from ..config import EngineConfig
from ..engine_api import Progress
from ..kv.groups import KvGroups, layer_rules
from ..layers.linear import LinearOptions
from ..models.registry import model_class
from ..models.weights import CheckpointWeights, DummyWeights
from .batch import BatchArrays, ModelInput, as_input, empty_batch, lay_out, leading_decodes, pad_decode
from .block_tables import BlockTables
from .buffers import Staging
from .device import choose_device, choose_dtype, choose_kv_dtype, set_threads
from .graphs import Bucket, Buckets, DecodeGraphs
from .sampler import SampleFields, Sampler, SampleRow, sample_rows
from .scoring import score_prompts, scored_tokens
from .step import PendingStep

# in the staging buffer, beside what the model reads: sampling parameters of a row, and alignment
BYTES_PER_ROW = 256
STAGING_SLACK = 1024


class ModelRunner:
    """positions: that the model was made for, None for no limit.

    depth: steps in flight at most; with 2 the next is submitted before the last one's result is read.

    buckets: shapes of decode steps that are recorded as graphs; None where all steps run eagerly.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, max_len: int, progress: Progress) -> None:
        self.device = choose_device(config.runner.device)
        self.dtype = choose_dtype(config.model.dtype, info)
        self.block_size = config.cache.block_size
        options, on_gpu = config.runner, self.device.type == "cuda"
        self.invariant = _given(options.batch_invariant, not on_gpu)
        self.depth = 2 if _given(options.async_scheduling, on_gpu) else 1
        set_threads(options, self.dtype)
        weights = _weights(config, self.dtype, self.device, progress)
        linear = LinearOptions(self.invariant, config.model.quantization)
        cache = config.cache
        self.groups = KvGroups.of(layer_rules(info.layer_windows, cache.window, cache.attention_sinks))
        self.positions = None if cache.window is not None else max_len
        self.model = model_class(info)(info, self.groups, weights, self.positions, self.device, linear)
        self._info = info
        self.kv_dtype = choose_kv_dtype(cache.kv_cache_dtype, self.dtype)
        self._layout = ops.KvLayout(
            self.groups.block_layers, info.kv_heads, self.block_size, info.head_dim, self.kv_dtype
        )
        self.kv = self._layout.allocate(0, self.device)
        self._scratch_block = 0
        rows, chunk = config.batch.max_num_seqs, config.batch.max_num_batched_tokens
        self._widths = self.groups.most_entries(max_len, self.block_size, chunk)
        self._frames = sorted(set(self.groups.frames))
        self._tables = BlockTables(rows, self._widths, self.block_size, self.groups)
        eager = _given(options.enforce_eager, not ops.can_record(self.device, self.dtype))
        self.buckets = None if eager else Buckets.up_to(rows, self._longest(max_len), exact=not on_gpu)
        # on the host nothing has to be packed but what a recording reads
        packed = 0 if eager and not on_gpu else self._staging_bytes(rows, chunk)
        self._staging = Staging(packed, self.device, depth=self.depth)
        self._sampler = Sampler(self.device)
        self._previous: PendingStep | None = None
        self._graphs: DecodeGraphs | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block across the layers of a group."""
        return self._layout.slab_bytes

    def allocate_kv(self, blocks: int) -> None:
        """Room for `blocks` blocks, and one more, where the rows that pad a batch write."""
        self.kv = self._layout.allocate(blocks + 1, self.device)
        self._scratch_block = blocks

    @torch.inference_mode()
    def record_graphs(self, progress: Progress) -> None:
        """Record the decode step in all its buckets, on the KV cache as allocated; nothing where steps run
        eagerly. On a CPU that is done as they come."""
        if self.buckets is None:
            return
        shape = (self.buckets.rows[-1], self._info.hidden_size)
        self._graphs = DecodeGraphs(
            self.buckets, self._forward, torch.empty(shape, dtype=self.dtype, device=self.device)
        )
        if self.device.type == "cpu":
            return
        for done, bucket in enumerate(self.buckets.descending()):
            progress("recording decode graphs", done / len(self.buckets))
            sent = self._staging.send(self._padded(empty_batch(self.groups), bucket).arrays)
            self._graphs.record(bucket, self._decode_input(sent, bucket))
        progress("recording decode graphs", 1.0)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. Steps run one after the other; a token that the one before samples may be this one's
        input, though the host has yet to read it."""
        rows = sample_rows(plan.chunks)
        sent = self._send(plan, rows)
        if plan.copies:
            ops.copy_blocks(self.kv.slabs, *sent.copies_2C.unbind())
        if self._previous is not None and sent.feed_2F.numel():
            fed_F, sampled_F = sent.feed_2F.unbind()
            sent.input.tokens_T[fed_F] = self._previous.tokens_R[sampled_F]
        if self._graphs is None or sent.bucket is None:
            hidden_TD = self._forward(sent.input)
        else:
            hidden_TD = self._graphs.run(sent.bucket, sent.input, len(plan.chunks))
        scored = score_prompts(self.model.logits, plan.chunks, hidden_TD, sent.scored_G)
        # a step in the middle of prompts samples for nobody
        tokens_R, reported = sent.sampling.logits_R, None
        if rows:
            sampled_S = sent.sampling.hidden_S
            logits_SV = self.model.logits(hidden_TD[sampled_S] if sampled_S.numel() else hidden_TD)
            tokens_R, reported = self._sampler.sample(logits_SV, rows, sent.sampling)
        self._previous = PendingStep([row.seq for row in rows], tokens_R, reported, scored)
        return self._previous

    def _send(self, plan: StepPlan, rows: Rows[SampleRow]) -> _Sent:
        """Everything the device must know of a step, in one copy."""
        chunks = plan.chunks
        known = {} if self._previous is None else self._previous.row_of
        batch, feed = lay_out(chunks, self._tables, self.block_size, known)
        bucket = self._bucket_of(chunks, batch)
        if bucket is not None:
            batch = self._padded(batch, bucket)
        copies = np.array(plan.copies, dtype=np.int64).reshape(-1, 2).T.copy()
        scored = np.array([token for chunk in chunks for token in scored_tokens(chunk)], dtype=np.int64)
        arrays, extras = batch.arrays, [feed, copies, scored]
        sent = self._staging.send([*arrays, *extras, *self._sampler.lay_out(chunks, rows)])
        tensors, rest = sent[: len(arrays)], sent[len(arrays) :]
        inputs = (
            self._eager_input(tensors, batch, chunks)
            if bucket is None
            else self._decode_input(tensors, bucket)
        )
        return _Sent(inputs, bucket, SampleFields(*rest[len(extras) :]), *rest[: len(extras)])

    def _bucket_of(self, chunks: tuple[Chunk, ...], batch: BatchArrays) -> Bucket | None:
        """The recording that runs these chunks; None for a step that has to run eagerly."""
        if self._graphs is None or any(chunk.count > 1 for chunk in chunks):
            return None
        longest = max(batch.max_context[frame] for frame in self._frames)
        return self._graphs.buckets.smallest(len(chunks), longest)

    def _padded(self, batch: BatchArrays, bucket: Bucket) -> BatchArrays:
        blocks = -(-bucket.context // self.block_size)
        widths = [min(width, blocks) for width in self._widths]
        return pad_decode(batch, bucket.rows, widths, scratch=self._scratch_block, block_size=self.block_size)

    def _eager_input(
        self, tensors: list[Tensor], batch: BatchArrays, chunks: tuple[Chunk, ...]
    ) -> ModelInput:
        return as_input(
            tensors,
            self.groups,
            max_query=max(chunk.count for chunk in chunks),
            max_context=batch.max_context,
            decodes=leading_decodes(chunks),
        )

    def _decode_input(self, tensors: list[Tensor], bucket: Bucket) -> ModelInput:
        limits = [self._widths[group] * self.block_size for group in self.groups.windowed]
        contexts = [bucket.context, *(min(bucket.context, limit) for limit in limits)]
        return as_input(tensors, self.groups, max_query=1, max_context=contexts, decodes=bucket.rows)

    def _longest(self, max_len: int) -> int:
        """Tokens that any group lists of one sequence at most."""
        return max(min(max_len, width * self.block_size) for width in self._widths)

    def _staging_bytes(self, rows: int, chunk: int) -> int:
        """Of the largest step: ids, positions and slots of its tokens; block tables; the rest by the row."""
        lists = 2 + len(self.groups.windowed) + len(self.groups)
        return 8 * lists * max(rows, chunk) + rows * (4 * sum(self._widths) + BYTES_PER_ROW) + STAGING_SLACK

    def _forward(self, inputs: ModelInput) -> Tensor:
        """Final hidden states [T, D]."""
        return self.model.forward(inputs.tokens_T, inputs.positions_T, self.kv, inputs.metas)


@dataclass(frozen=True)
class _Sent:
    """A step's data on the device, and the recording that runs it.

    feed_2F: tokens to be filled in, and rows of the last step's samples. copies_2C: blocks, from and to.
    scored_G: prompt tokens to be scored.
    """

    input: ModelInput
    bucket: Bucket | None
    sampling: SampleFields[Tensor]
    feed_2F: Tensor
    copies_2C: Tensor
    scored_G: Tensor


def _given(option: bool | None, default: bool) -> bool:
    return default if option is None else option


def _weights(
    config: EngineConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> CheckpointWeights | DummyWeights:
    if config.model.load_format == "dummy":
        return DummyWeights(dtype, device)

    def on_bytes(read: int, total: int) -> None:
        progress("loading weights", read / max(total, 1))

    return CheckpointWeights(config.model.folder, dtype, device, on_bytes)

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
from ..config import BatchConfig, EngineConfig
from ..engine_api import Progress
from ..kv.groups import KvGroups, WindowRule
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
    """depth: steps in flight at most; with 2 the next is submitted before the last one's result is read.

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
        self.groups = KvGroups.of([WindowRule(window) for window in info.layer_windows])
        self.model = model_class(info)(info, self.groups, weights, max_len, self.device, linear)
        self._info = info
        self.kv_dtype = choose_kv_dtype(config.cache.kv_cache_dtype, self.dtype)
        self._layout = ops.KvLayout(
            self.groups.block_layers, info.kv_heads, self.block_size, info.head_dim, self.kv_dtype
        )
        self.kv = self._layout.allocate(0, self.device)
        self._scratch_block = 0
        rows, width = config.batch.max_num_seqs, self._blocks_for(max_len)
        self._tables = BlockTables(rows, width, self.block_size, len(self.groups))
        eager = _given(options.enforce_eager, not ops.can_record(self.device, self.dtype))
        self.buckets = None if eager else Buckets.up_to(rows, max_len, exact=not on_gpu)
        # on the host nothing has to be packed but what a recording reads
        packed = 0 if eager and not on_gpu else _staging_bytes(rows, width, len(self.groups), config.batch)
        self._staging = Staging(packed, self.device, depth=self.depth)
        self._sampler = Sampler(max_len, self.device)
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
            sent = self._staging.send(self._padded(empty_batch(len(self.groups)), bucket))
            self._graphs.record(bucket, _decode_input(sent, bucket))
        progress("recording decode graphs", 1.0)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. Steps run one after the other; a token that the one before samples may be this one's
        input, though the host has yet to read it."""
        rows = sample_rows(plan.chunks)
        bucket = self._bucket_of(plan.chunks)
        sent = self._send(plan, rows, bucket)
        if plan.copies:
            ops.copy_blocks(self.kv.slabs, *sent.copies_2C.unbind())
        if self._previous is not None and sent.feed_2F.numel():
            fed_F, sampled_F = sent.feed_2F.unbind()
            sent.input.tokens_T[fed_F] = self._previous.tokens_R[sampled_F]
        if self._graphs is None or bucket is None:
            hidden_TD = self._forward(sent.input)
        else:
            hidden_TD = self._graphs.run(bucket, sent.input, len(plan.chunks))
        scored = score_prompts(self.model.logits, plan.chunks, hidden_TD, sent.scored_G)
        # a step in the middle of prompts samples for nobody
        tokens_R, reported = sent.sampling.logits_R, None
        if rows:
            sampled_S = sent.sampling.hidden_S
            logits_SV = self.model.logits(hidden_TD[sampled_S] if sampled_S.numel() else hidden_TD)
            tokens_R, reported = self._sampler.sample(logits_SV, rows, sent.sampling)
        self._previous = PendingStep([row.seq for row in rows], tokens_R, reported, scored)
        return self._previous

    def _bucket_of(self, chunks: tuple[Chunk, ...]) -> Bucket | None:
        """The recording that runs these chunks; None for a step that has to run eagerly."""
        if self._graphs is None or any(chunk.count > 1 for chunk in chunks):
            return None
        return self._graphs.buckets.smallest(len(chunks), max(chunk.start for chunk in chunks) + 1)

    def _send(self, plan: StepPlan, rows: Rows[SampleRow], bucket: Bucket | None) -> _Sent:
        """Everything the device must know of a step, in one copy."""
        chunks = plan.chunks
        known = {} if self._previous is None else self._previous.row_of
        batch, feed = lay_out(chunks, self._tables, self.block_size, known)
        if bucket is not None:
            batch = self._padded(batch, bucket)
        copies = np.array(plan.copies, dtype=np.int64).reshape(-1, 2).T.copy()
        scored = np.array([token for chunk in chunks for token in scored_tokens(chunk)], dtype=np.int64)
        extras = [feed, copies, scored]
        sent = self._staging.send([*batch, *extras, *self._sampler.lay_out(chunks, rows)])
        tensors, rest = sent[: len(batch)], sent[len(batch) :]
        return _Sent(
            _decode_input(tensors, bucket) if bucket is not None else _eager_input(tensors, chunks),
            SampleFields(*rest[len(extras) :]),
            *rest[: len(extras)],
        )

    def _padded(self, batch: BatchArrays, bucket: Bucket) -> BatchArrays:
        width = self._blocks_for(bucket.context)
        return pad_decode(batch, bucket.rows, width, scratch=self._scratch_block, block_size=self.block_size)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _forward(self, inputs: ModelInput) -> Tensor:
        """Final hidden states [T, D]."""
        return self.model.forward(inputs.tokens_T, inputs.positions_T, self.kv, inputs.metas)


@dataclass(frozen=True)
class _Sent:
    """A step's data on the device. feed_2F: tokens to be filled in, and rows of the last step's samples.

    copies_2C: blocks, from and to. scored_G: prompt tokens to be scored.
    """

    input: ModelInput
    sampling: SampleFields[Tensor]
    feed_2F: Tensor
    copies_2C: Tensor
    scored_G: Tensor


def _eager_input(tensors: list[Tensor], chunks: tuple[Chunk, ...]) -> ModelInput:
    return as_input(
        tensors,
        max_query=max(chunk.count for chunk in chunks),
        max_context=max(chunk.start + chunk.count for chunk in chunks),
        decodes=leading_decodes(chunks),
    )


def _decode_input(tensors: list[Tensor], bucket: Bucket) -> ModelInput:
    return as_input(tensors, max_query=1, max_context=bucket.context, decodes=bucket.rows)


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


def _staging_bytes(rows: int, width: int, groups: int, batch: BatchConfig) -> int:
    """Of the largest step: ids, positions and slots of its tokens; block tables; the rest by the row."""
    tokens = max(rows, batch.max_num_batched_tokens)
    return 8 * (2 + groups) * tokens + rows * (4 * width * groups + BYTES_PER_ROW) + STAGING_SLACK

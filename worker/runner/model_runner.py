"""From planned steps to sampled tokens: lays a step out in arrays, has all ranks run it, and samples.

`submit(plan)` is the whole interface: copies, forward, sampling, in the order of submission and without
waiting for the device. Knows sequences only to read their tokens, blocks and parameters; never changes them.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from decodefleet.kernels import ops

from ..assets.checkpoint import ModelInfo
from ..batcher import StepPlan
from ..config import EngineConfig
from ..engine_api import Progress
from ..kv.groups import KvGroups
from ..parallel.gang import Gang
from ..parallel.orders import Order
from ..parallel.ranks import ALONE
from ..parallel.stores import GangStores
from .batch import lay_out, leading_decodes
from .block_tables import BlockTables
from .device import meet
from .rank_model import RankModel
from .sampler import SampleFields, Sampler, sample_rows, sampled_rows
from .scoring import joined, score_prompts, scored_spans, scored_tokens
from .step import PendingStep
from .step_arrays import StepArrays, pairs


class ModelRunner:
    """gang: the other ranks of the model, None for a model on one.

    stores: where those keep KV blocks below the pool; None without other ranks.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        max_len: int,
        progress: Progress,
        gang: Gang | None = None,
    ) -> None:
        self._gang = gang
        ranks = ALONE if gang is None else meet(config, info, 0, gang.store, gang.exchange)
        self.rank = RankModel(config, info, max_len, ranks, progress)
        if gang is not None:
            gang.await_loaded()
        self.stores = None if gang is None else GangStores(gang, self.rank.ranks.shard.size - 1)
        rows = config.batch.max_num_seqs
        self._tables = BlockTables(rows, self.rank.widths, self.block_size, self.groups)
        self._sampler = Sampler(self.device)
        self._previous: PendingStep | None = None

    @property
    def device(self) -> torch.device:
        return self.rank.device

    @property
    def block_size(self) -> int:
        return self.rank.block_size

    @property
    def groups(self) -> KvGroups:
        return self.rank.groups

    @property
    def depth(self) -> int:
        return self.rank.depth

    @property
    def kv(self) -> ops.KvCache:
        """Of this rank."""
        return self.rank.kv

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block across the layers of a group, on each rank."""
        return self.rank.layout.slab_bytes

    def allocate_kv(self, blocks: int) -> None:
        self._tell(Order.ALLOCATE, blocks)
        self.rank.allocate_kv(blocks)

    def record_graphs(self, progress: Progress) -> None:
        self._tell(Order.RECORD)
        self.rank.record_graphs(progress)

    def settle(self) -> None:
        self._tell(Order.SETTLE)
        self.rank.settle()

    def close(self) -> None:
        if self._gang is not None:
            self._gang.close()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. Steps run one after the other; a token that the one before samples may be this one's
        input, though the host has yet to read it."""
        chunks = plan.chunks
        rows = sample_rows(chunks)
        wanted = [scored_tokens(chunk) for chunk in chunks]
        step = self._lay_out(plan, len(rows), wanted)
        if self._gang is not None:
            numbers, arrays = step.pack()
            self._gang.send([Order.STEP, *numbers], arrays)
        ran = self.rank.run(step, [joined(wanted), *self._sampler.lay_out(chunks, rows)])
        targets_G, *sampling = ran.extras
        scored = score_prompts(self.rank.scored_logits(step, ran), chunks, wanted, targets_G)
        # a step in the middle of prompts samples for nobody
        tokens_R, reported = targets_G[:0], None
        if rows:
            logits_SV = self.rank.sampled_logits(ran)
            tokens_R, reported = self._sampler.sample(logits_SV, rows, SampleFields(*sampling))
            self.rank.take_samples(tokens_R)
        self._previous = PendingStep([row.seq for row in rows], tokens_R, reported, scored)
        return self._previous

    def _lay_out(self, plan: StepPlan, samples: int, scored: Rows[list[int]]) -> StepArrays:
        chunks = plan.chunks
        known = {} if self._previous is None else self._previous.row_of
        batch, feed = lay_out(chunks, self._tables, self.block_size, known)
        max_query = max(chunk.count for chunk in chunks)
        bucket = self.rank.bucket_of(batch, max_query)
        return StepArrays(
            batch=batch if bucket is None else self.rank.padded(batch, bucket),
            bucket=bucket,
            chunks=len(chunks),
            max_query=max_query,
            decodes=leading_decodes(chunks),
            samples=samples,
            feed_2F=feed,
            copies_2C=pairs(plan.copies),
            hidden_S=sampled_rows(chunks),
            scored_S2=scored_spans(chunks, scored),
        )

    def _tell(self, order: Order, *numbers: int) -> None:
        if self._gang is not None:
            self._gang.send([order, *numbers], [])

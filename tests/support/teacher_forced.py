"""Logits at every position of given tokens: ours, in any chunks, and those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decodefleet.worker.assets.checkpoint import read_config
from decodefleet.worker.batcher import Chunk
from decodefleet.worker.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig
from decodefleet.worker.runner.batch import as_input, lay_out
from decodefleet.worker.runner.block_tables import BlockTables
from decodefleet.worker.runner.model_runner import ModelRunner
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.sequence import BlockList, Request, Sequence

BLOCK = 16


def make_runner(folder: Path, dtype: str, max_tokens: int = 512, **cache: Any) -> ModelRunner:
    """With a KV cache for one sequence. cache: fields of CacheConfig."""
    config = EngineConfig(
        model=ModelConfig(folder=folder, served_name="m", dtype=dtype),
        cache=CacheConfig(**cache),
        runner=RunnerConfig(device="cpu"),
    )
    runner = ModelRunner(config, read_config(folder), max_tokens, lambda *_: None)
    runner.allocate_kv(-(-max_tokens // BLOCK) * len(runner.groups))
    return runner


@torch.inference_mode()
def our_logits(runner: ModelRunner, tokens: list[int], cuts: list[int], last: int = 0) -> Tensor:
    """Logits at the `last` positions (0: at all), computed in chunks that end at `cuts`; blocks lie out of
    order."""
    request = Request("r", 0, SamplingParams(), tokens, b"", 1, frozenset(), (0, 0))
    groups, used = len(runner.groups), -(-len(tokens) // BLOCK)
    pages = torch.randperm(len(runner.kv.slabs) - 1, generator=torch.Generator().manual_seed(0)).tolist()
    blocks = [BlockList(pages[g * used : (g + 1) * used]) for g in range(groups)]
    seq = Sequence(request, 0, 0, tokens, [], blocks=blocks)
    tables, rows = BlockTables(1, [used] * groups, BLOCK, runner.groups), []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        batch, _ = lay_out((Chunk(seq, start, end - start, samples=True),), tables, BLOCK, {})
        tensors = [torch.from_numpy(array) for array in batch.arrays]
        maxima = {"max_query": end - start, "max_context": batch.max_context}
        inputs = as_input(tensors, runner.groups, **maxima, decodes=0)
        rows.append(runner.rank.forward(inputs))
    return runner.rank.model.logits(torch.cat(rows)[-last:])


@torch.inference_mode()
def their_logits(model: torch.nn.Module, tokens: list[int], last: int = 0) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens]), logits_to_keep=last).logits[0].float()
    return logits

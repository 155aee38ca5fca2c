"""Holds the model and the KV cache on a device, and runs planned steps on them.

`execute(plan)` is the whole interface: copies, forward, sampling. Knows sequences only to read their tokens,
blocks and parameters; never changes them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decodefleet.kernels import ops

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError
from ..batcher import Chunk, StepPlan
from ..config import EngineConfig, RunnerConfig
from ..engine_api import Progress
from ..layers.linear import LinearOptions
from ..models.registry import model_class
from ..models.weights import CheckpointWeights, DummyWeights
from ..protocol import TokenLogprobs
from ..sequence import Sequence
from .batch import ModelInput, build_input
from .sampler import Sampled, SampleRow, sample, token_logprobs

# rows of logits held at once where a whole prompt is scored
SCORED_ROWS = 64


@dataclass(frozen=True)
class StepResult:
    """sampled: one per sequence that reached its end, siblings to be forked included.

    scored: log-probabilities of the prompt tokens that follow this step's, for those who asked.
    """

    sampled: list[tuple[Sequence, Sampled]] = field(default_factory=list)
    scored: list[tuple[Sequence, list[TokenLogprobs]]] = field(default_factory=list)


class ModelRunner:
    def __init__(self, config: EngineConfig, info: ModelInfo, max_len: int, progress: Progress) -> None:
        self.device = choose_device(config.runner.device)
        self.dtype = choose_dtype(config.model.dtype, info)
        self.block_size = config.cache.block_size
        invariant = config.runner.batch_invariant
        self.invariant = self.device.type == "cpu" if invariant is None else invariant
        set_threads(config.runner)
        build = model_class(info)
        if config.model.load_format == "dummy":
            weights: CheckpointWeights | DummyWeights = DummyWeights(self.dtype, self.device)
        else:
            weights = CheckpointWeights(
                config.model.folder,
                self.dtype,
                self.device,
                lambda read, total: progress("loading weights", read / max(total, 1)),
            )
        linear = LinearOptions(self.invariant, config.model.quantization)
        self.model = build(info, weights, max_len, self.device, linear)
        self._slab_shape = (info.layers, 2, info.kv_heads, self.block_size, info.head_dim)
        self.kv = torch.empty(0)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block across all layers."""
        return torch.Size(self._slab_shape).numel() * self.dtype.itemsize

    def allocate_kv(self, blocks: int) -> None:
        # zeros, since masked keys are multiplied by weight 0, which NaN would survive
        self.kv = torch.zeros((blocks, *self._slab_shape), dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        if plan.copies:
            sources, targets = torch.tensor(plan.copies, device=self.device).T
            ops.copy_blocks(self.kv, sources, targets)
        inputs = build_input(plan.chunks, self.block_size, self.device)
        hidden_TD = self.model.forward(inputs.tokens_T, self.kv, inputs.meta)
        return StepResult(self._sample(plan, inputs, hidden_TD), self._score(plan, hidden_TD))

    def _sample(
        self, plan: StepPlan, inputs: ModelInput, hidden_TD: Tensor
    ) -> list[tuple[Sequence, Sampled]]:
        sampling = [chunk.seq for chunk in plan.chunks if chunk.samples]
        if not sampling:
            return []
        logits_RV = self.model.logits(hidden_TD[inputs.sample_rows])
        rows, source_row = [], []
        for i, seq in enumerate(sampling):
            for target in (seq, *seq.request.unborn):
                rows.append(SampleRow(target, seq, target.request.banned_tokens(target.output_tokens)))
                source_row.append(i)
        sampled = sample(logits_RV[source_row] if len(rows) > len(sampling) else logits_RV, rows)
        return [(row.seq, token) for row, token in zip(rows, sampled, strict=True)]

    def _score(self, plan: StepPlan, hidden_TD: Tensor) -> list[tuple[Sequence, list[TokenLogprobs]]]:
        scored, row = [], 0
        for chunk in plan.chunks:
            top = chunk.seq.request.params.prompt_logprobs
            if top is not None and chunk.start < chunk.seq.prompt_len:
                scored.append((chunk.seq, self._score_chunk(chunk, hidden_TD[row : row + chunk.count], top)))
            row += chunk.count
        return scored

    def _score_chunk(self, chunk: Chunk, hidden_TD: Tensor, top: int) -> list[TokenLogprobs]:
        """The prompt token behind each of the chunk's, under the logits of its own row."""
        prompt = chunk.seq.tokens[: chunk.seq.prompt_len]
        targets = prompt[chunk.start + 1 : chunk.start + chunk.count + 1]
        scored: list[TokenLogprobs] = []
        for first in range(0, len(targets), SCORED_ROWS):
            part = targets[first : first + SCORED_ROWS]
            logits_RV = self.model.logits(hidden_TD[first : first + len(part)])
            scored += [token_logprobs(row, token, top) for row, token in zip(logits_RV, part, strict=True)]
        return scored


def choose_device(wanted: str) -> torch.device:
    """Raises ModelError where CUDA is asked for and there is none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "There is no usable CUDA device.", "Install a CUDA build of torch, or pass `--device cpu`."
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def choose_dtype(wanted: str, info: ModelInfo) -> torch.dtype:
    name = wanted if wanted != "auto" else info.dtype or "bfloat16"
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ModelError(
            f"The checkpoint's dtype {name} is not supported.", f"Pass --dtype {', '.join(dtypes)}."
        )
    return dtypes[name]


def set_threads(config: RunnerConfig) -> None:
    ops.set_cpu_threads(config.threads or len(os.sched_getaffinity(0)))

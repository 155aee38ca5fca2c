"""Decode steps recorded once and replayed: a launch costs the host one call instead of hundreds.

A recording holds addresses and grids, so it belongs to a bucket: so many rows, contexts up to so many tokens.
A batch of single tokens runs in the smallest bucket that holds it, padded. On a GPU a recording is a CUDA
graph, made before requests come; on a CPU it is a list of native calls, made when it is first wanted. All
share the memory for what they compute in between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from decodefleet.kernels import ops

from .batch import ModelInput

# contexts grow by this factor from bucket to bucket: attention launches programs for the longest allowed, and
# those beyond a sequence's end cost little, but there would be hundreds of recordings with finer steps
CONTEXT_FACTOR = 4
SHORTEST_CONTEXT = 2048

Forward = Callable[[ModelInput], Tensor]


@dataclass(frozen=True)
class Bucket:
    """rows: sequences with one new token each; context: tokens in the cache of the longest."""

    rows: int
    context: int


@dataclass(frozen=True)
class Buckets:
    """Which shapes are recorded; ascending."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    @staticmethod
    def up_to(max_rows: int, max_context: int, *, exact: bool = False) -> Buckets:
        """Rows 1, 2, 4, then by 8 to 256, then by 32 (all if `exact`); contexts by CONTEXT_FACTOR; the maxima
        always included."""
        steps = range(1, max_rows) if exact else (1, 2, 4, *range(8, 257, 8), *range(288, max_rows, 32))
        contexts = []
        context = SHORTEST_CONTEXT
        while context < max_context:
            contexts.append(context)
            context *= CONTEXT_FACTOR
        return Buckets((*(n for n in steps if n < max_rows), max_rows), (*contexts, max_context))

    def smallest(self, rows: int, context: int) -> Bucket:
        """The bucket for a batch within the maxima."""
        return Bucket(
            self.rows[bisect_left(self.rows, rows)], self.contexts[bisect_left(self.contexts, context)]
        )

    def descending(self) -> Iterator[Bucket]:
        """Largest first, so that the smaller ones find their memory in the pool."""
        return (Bucket(n, context) for context in reversed(self.contexts) for n in reversed(self.rows))

    def __len__(self) -> int:
        return len(self.rows) * len(self.contexts)


@dataclass(frozen=True)
class Recording:
    """address: of the inputs it was recorded with. output: [rows, hidden], overwritten by every replay.

    replay: None where the forward pass cannot be repeated without Python.
    """

    replay: Callable[[], None] | None
    address: int
    output: Tensor


class DecodeGraphs:
    """output: [rows, hidden] on the device, where the largest bucket's rows fit."""

    def __init__(self, buckets: Buckets, forward: Forward, output: Tensor) -> None:
        self.buckets = buckets
        self._forward = forward
        self._output = output
        self._recordings: dict[Bucket, Recording] = {}
        self._pool = torch.cuda.graph_pool_handle() if output.is_cuda else None
        self._memory = ops.RecordingMemory()

    def record(self, bucket: Bucket, inputs: ModelInput) -> Tensor:
        """Hidden states for these inputs: in the bucket's shapes, at the addresses of all later ones."""
        recording = self._on_gpu(bucket, inputs) if self._output.is_cuda else self._on_cpu(inputs)
        self._recordings[bucket] = recording
        return recording.output

    def run(self, bucket: Bucket, inputs: ModelInput, rows: int) -> Tensor:
        """Hidden states of the first `rows` rows, valid until the next run."""
        recording = self._recordings.get(bucket)
        if recording is None:
            return self.record(bucket, inputs)[:rows]
        if recording.replay is None:
            return self._forward(inputs)[:rows]
        assert recording.address == inputs.tokens_T.data_ptr(), "a graph would read another step's inputs"
        recording.replay()
        return recording.output[:rows]

    def _on_gpu(self, bucket: Bucket, inputs: ModelInput) -> Recording:
        output = self._output[: bucket.rows]

        def run() -> None:
            output.copy_(self._forward(inputs))

        # the first run compiles kernels and allocates workspaces, which a capture must not
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return Recording(graph.replay, inputs.tokens_T.data_ptr(), output)

    def _on_cpu(self, inputs: ModelInput) -> Recording:
        output, replay = ops.record(lambda: self._forward(inputs), self._memory)
        return Recording(replay, inputs.tokens_T.data_ptr(), output)

"""Decode steps recorded once and replayed: a launch costs the host one call instead of hundreds.

A recording holds addresses and grids, so it belongs to a bucket: so many rows, contexts up to so many tokens.
A batch of single tokens runs in the smallest bucket that holds it, padded. All buckets share one pool of
memory and one output. Off CUDA a recording is the call itself, so that tests run everything but the capture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
    def up_to(max_rows: int, max_context: int) -> Buckets:
        """1, 2, 4, then by 8 to 256, then by 32; contexts by CONTEXT_FACTOR; the maxima always included."""
        steps = (1, 2, 4, *range(8, 257, 8), *range(288, max_rows, 32))
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
    """address: of the inputs it was recorded with."""

    replay: Callable[[], None]
    address: int


class DecodeGraphs:
    """output: [rows, hidden], where the largest bucket's rows fit; every replay overwrites it."""

    def __init__(self, buckets: Buckets, forward: Forward, output: Tensor) -> None:
        self.buckets = buckets
        self._forward = forward
        self._output = output
        self._recordings: dict[Bucket, Recording] = {}
        self._pool = torch.cuda.graph_pool_handle() if output.is_cuda else None

    def record(self, bucket: Bucket, inputs: ModelInput) -> None:
        """inputs: of the bucket's shapes, at the addresses where every later step will put its own."""
        output = self._output[: bucket.rows]

        def run() -> None:
            output.copy_(self._forward(inputs))

        # the first run compiles kernels and allocates workspaces, which a capture must not
        run()
        self._recordings[bucket] = Recording(self._captured(run), inputs.tokens_T.data_ptr())

    def replay(self, bucket: Bucket, inputs: ModelInput, rows: int) -> Tensor:
        """Hidden states of the first `rows` rows, valid until the next replay."""
        recording = self._recordings[bucket]
        assert recording.address == inputs.tokens_T.data_ptr(), "a graph would read another step's inputs"
        recording.replay()
        return self._output[:rows]

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        if self._pool is None:
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay

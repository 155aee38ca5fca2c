"""Which bucket runs a batch, and that a recording reads what was put where it was recorded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decodefleet.kernels import ops
from decodefleet.worker.kv.groups import PLAIN
from decodefleet.worker.runner.batch import ModelInput, as_input
from decodefleet.worker.runner.graphs import Bucket, Buckets, DecodeGraphs


def test_the_buckets_of_a_usual_worker() -> None:
    buckets = Buckets.up_to(64, 8192)
    assert buckets.rows == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert buckets.contexts == (2048, 8192)
    assert Buckets.up_to(64, 131072).contexts == (2048, 8192, 32768, 131072)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 255, 256, 257, 288, 300, 1000])
def test_the_largest_bucket_is_the_maximum(rows: int) -> None:
    buckets = Buckets.up_to(rows, 100)
    assert buckets.rows[-1] == rows
    assert buckets.contexts == (100,)
    assert list(buckets.rows) == sorted(set(buckets.rows))


@settings(deadline=None)
@given(st.data(), st.integers(1, 600), st.integers(1, 40_000))
def test_the_smallest_bucket_that_holds_a_batch(data: st.DataObject, max_rows: int, max_context: int) -> None:
    buckets = Buckets.up_to(max_rows, max_context)
    rows = data.draw(st.integers(1, max_rows))
    context = data.draw(st.integers(1, max_context))
    bucket = buckets.smallest(rows, context)
    assert bucket.rows == min(n for n in buckets.rows if n >= rows)
    assert bucket.context == min(n for n in buckets.contexts if n >= context)
    # a batch is never padded to twice itself, but for the smallest
    assert bucket.rows <= max(2 * rows, 8)


def test_largest_first() -> None:
    order = list(Buckets.up_to(4, 3000).descending())
    assert order == [Bucket(rows, context) for context in (3000, 2048) for rows in (4, 2, 1)]
    assert len(order) == len(Buckets.up_to(4, 3000))


def inputs_of(tokens: torch.Tensor) -> ModelInput:
    nothing = torch.zeros(0)
    return as_input(
        [tokens.expand(3, -1), nothing, nothing.view(1, 0), nothing],
        PLAIN,
        max_query=1,
        max_context=[8],
        decodes=len(tokens),
    )


TABLE = torch.arange(128, dtype=torch.bfloat16).view(8, 16)


@pytest.mark.skipif(not ops.can_record(torch.device("cpu"), torch.bfloat16), reason="no C++ compiler")
def test_a_replay_reads_the_tokens_of_its_step() -> None:
    runs = []

    def forward(inputs: ModelInput) -> torch.Tensor:
        runs.append(inputs)
        return ops.embed(inputs.tokens_T, TABLE)

    graphs = DecodeGraphs(Buckets.up_to(4, 8), forward, torch.full((4, 16), float("nan")))
    tokens, bucket = torch.tensor([1, 2]), Bucket(2, 8)
    assert torch.equal(graphs.run(bucket, inputs_of(tokens), 2), TABLE[[1, 2]].float())
    tokens.copy_(torch.tensor([7, 0]))
    assert torch.equal(graphs.run(bucket, inputs_of(tokens), 1), TABLE[[7]].float())
    assert len(runs) == 1
    with pytest.raises(AssertionError, match="another step"):
        graphs.run(bucket, inputs_of(torch.tensor([7, 0])), 1)


def test_what_cannot_be_recorded_runs_again_each_time() -> None:
    def forward(inputs: ModelInput) -> torch.Tensor:
        return inputs.tokens_T.float().unsqueeze(1).expand(-1, 3)

    graphs = DecodeGraphs(Buckets.up_to(4, 8), forward, torch.full((4, 3), float("nan")))
    tokens, bucket = torch.tensor([1, 2]), Bucket(2, 8)
    graphs.record(bucket, inputs_of(tokens))
    assert graphs.run(bucket, inputs_of(torch.tensor([7, 0])), 1).tolist() == [[7.0, 7.0, 7.0]]

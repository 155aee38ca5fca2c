"""Steps that nobody asked for, to learn before requests come what a step costs in memory and time."""

from __future__ import annotations

import itertools

from ..batcher import Chunk, StepPlan
from ..sampling_params import SamplingParams
from ..sequence import BlockList, Request, Sequence, State

GREEDY = SamplingParams(temperature=0.0)
# all that a request can ask of the sampler, which takes the most memory and the most kernels
EVERYTHING = SamplingParams(
    top_p=0.9, top_k=50, min_p=0.01, seed=0, repetition_penalty=1.1, logprobs=5, prompt_logprobs=5
)


def rehearsal(counts: list[int], block_size: int, groups: int, params: SamplingParams = GREEDY) -> StepPlan:
    """A step that prefills so many tokens for each of len(counts) sequences, in the first blocks."""
    chunks: list[Chunk] = []
    fresh = itertools.count()
    for count in counts:
        held = -(-count // block_size)
        blocks = [BlockList([*itertools.islice(fresh, held)]) for _ in range(groups)]
        chunks.append(Chunk(_sequence(count, blocks, params), 0, count, samples=True))
    return StepPlan(tuple(chunks), ())


def _sequence(tokens: int, blocks: list[BlockList], params: SamplingParams) -> Sequence:
    request = Request(
        request_id="rehearsal",
        attempt=0,
        params=params,
        prompt=[0] * tokens,
        root_hash=b"",
        max_tokens=1,
        end_tokens=frozenset(),
        order=(0, 0),
    )
    return Sequence(request, 0, 0, [0] * tokens, [], state=State.FINISHED, blocks=blocks)

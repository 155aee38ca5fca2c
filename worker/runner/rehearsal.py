"""Steps that nobody asked for, to learn before requests come what a step costs in memory and time."""

from __future__ import annotations

from ..batcher import Chunk, StepPlan
from ..sampling_params import SamplingParams
from ..sequence import Request, Sequence, State

GREEDY = SamplingParams(temperature=0.0)
# all that a request can ask of the sampler, which takes the most memory and the most kernels
EVERYTHING = SamplingParams(
    top_p=0.9, top_k=50, min_p=0.01, seed=0, repetition_penalty=1.1, logprobs=5, prompt_logprobs=5
)


def rehearsal(counts: list[int], block_size: int, params: SamplingParams = GREEDY) -> StepPlan:
    """A step that prefills so many tokens for each of len(counts) sequences, in the first blocks."""
    chunks: list[Chunk] = []
    block = 0
    for count in counts:
        blocks = list(range(block, block - (-count // block_size)))
        block += len(blocks)
        chunks.append(Chunk(_sequence(count, blocks, params), 0, count, samples=True))
    return StepPlan(tuple(chunks), ())


def _sequence(tokens: int, blocks: list[int], params: SamplingParams) -> Sequence:
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

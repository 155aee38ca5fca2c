"""Steps that nobody asked for, to learn before requests come what a step costs in memory and time."""

from __future__ import annotations

from ..batcher import Chunk, StepPlan
from ..sampling_params import SamplingParams
from ..sequence import Request, Sequence, State


def rehearsal(tokens: int, sequences: int, block_size: int) -> StepPlan:
    """A step that prefills `tokens` tokens of so many sequences into the first blocks and samples for all."""
    chunks: list[Chunk] = []
    block = 0
    for index in range(sequences):
        count = tokens // sequences + (index < tokens % sequences)
        blocks = -(-count // block_size)
        chunks.append(Chunk(_sequence(count, list(range(block, block + blocks))), 0, count, samples=True))
        block += blocks
    return StepPlan(tuple(chunks), ())


def _sequence(tokens: int, blocks: list[int]) -> Sequence:
    request = Request(
        request_id="rehearsal",
        attempt=0,
        # sampling at random needs the most memory
        params=SamplingParams(temperature=1.0, top_p=0.9, seed=0),
        prompt=[0] * tokens,
        root_hash=b"",
        max_tokens=1,
        end_tokens=frozenset(),
        order=(0, 0),
    )
    return Sequence(request, 0, 0, [0] * tokens, [], state=State.FINISHED, blocks=blocks)

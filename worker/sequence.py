"""A request and its sequences: tokens, how far they are computed, and the blocks that hold their KV.

There is no prefill or decode phase, only `computed` trailing `length`. A request owns 1 to n sequences;
with n > 1 the first computes the prompt for all, and its siblings are forked from it when that is done.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from .protocol import FinishReason, TokenLogprobs
from .sampling_params import SamplingParams


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """What came in, once validated.

    order: (priority, arrival): smaller is served first.
    max_tokens: of each sequence, bounded by the model's length.
    end_tokens: token ids that end a sequence.
    live: sequences that have not finished; `unborn`: those of them that wait to be forked.
    arrived: on the engine's clock, in s.
    """

    request_id: str
    attempt: int
    params: SamplingParams
    prompt: list[int]
    root_hash: bytes
    max_tokens: int
    end_tokens: frozenset[int]
    order: tuple[int, int]
    live: list[Sequence] = field(default_factory=list)
    unborn: list[Sequence] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    @property
    def reads_cache(self) -> bool:
        """A prompt whose log-probabilities are asked for has to be computed whole."""
        return self.params.prompt_logprobs is None

    def finish_reason(self, token: int, output_tokens: int) -> FinishReason | None:
        """Whether a sequence ends with this token, its output_tokens-th."""
        if token in self.end_tokens:
            return "stop"
        return "length" if output_tokens >= self.max_tokens else None


@dataclass(eq=False, slots=True)
class BlockList:
    """A sequence's blocks in one KV group.

    ids: an entry per block, in order; the pool's scratch block once a block slid out of the window.
    slid: the blocks from the sinks' on to here did.
    dropped: so many of these have no entry any more, behind the first `kept` entries.
    """

    ids: list[int]
    slid: int = 0
    kept: int = 0
    dropped: int = 0

    @property
    def end(self) -> int:
        """Blocks of the sequence, whether they have an entry or not."""
        return self.dropped + len(self.ids)

    def whole(self, nothing: int) -> list[int]:
        """An entry for each block of the sequence, `nothing` where there is none."""
        return [*self.ids[: self.kept], *[nothing] * self.dropped, *self.ids[self.kept :]]


@dataclass(eq=False)
class Sequence:
    """Mutable: the batcher moves it between states, the KV manager owns `blocks` and `hashes`.

    blocks: one list per KV group, all to the same end; none while nothing is held.
    restoring: whether some of its blocks are on their way from a lower tier; it computes nothing till then.
    pending: tokens that a step in flight samples; they follow `tokens`, and only the device knows them yet.
    computed: tokens whose keys and values are there once the steps in flight have run.
    hashes: chained hashes of the leading full blocks, as far as known (given for the prompt, extended here).
    committed: leading blocks that are computed, hashed and findable.
    cached_tokens: prompt tokens that the prefix cache supplied at first admission; None before.
    emitted: whether a delta went out already.
    began: when its first step was launched, on the clock of `Request.arrived`; None before, and where it was
        forked.
    """

    request: Request
    index: int
    seed: int
    tokens: list[int]
    hashes: list[bytes]
    state: State = State.WAITING
    restoring: bool = False
    computed: int = 0
    pending: int = 0
    blocks: list[BlockList] = field(default_factory=list)
    committed: int = 0
    cached_tokens: int | None = None
    emitted: bool = False
    began: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int, int]:
        return (*self.request.order, self.index)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def length(self) -> int:
        """Tokens, those in flight included."""
        return len(self.tokens) + self.pending

    @property
    def output_tokens(self) -> int:
        """Of `length`, those that are not the prompt's."""
        return self.length - self.prompt_len

    @property
    def banned_tokens(self) -> tuple[int, ...]:
        """What must not be sampled next."""
        request = self.request
        if not request.params.min_tokens or self.output_tokens >= request.params.min_tokens:
            return ()
        return tuple(request.end_tokens)

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are not computed yet; 0 where the last token allowed is in flight."""
        length, request = len(self.tokens) + self.pending, self.request
        if self.pending and length - len(request.prompt) >= request.max_tokens:
            return 0
        return length - self.computed

    @property
    def decoding(self) -> bool:
        return self.computed >= len(self.request.prompt) and self.remaining == 1

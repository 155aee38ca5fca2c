"""One simulated sequence, and those that decode together, advanced by many steps at once.

All who decode advance by one token per step, so that a group needs no loop over its members: what each holds
follows from the step at which it joined. Knows nothing of pools, budgets or time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from decodefleet.worker.kv.hashing import split_hashes

from .arrivals import Arrival


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in a worker. Its blocks are `named` ones, which others may share, and so many nameless ones.

    computed: tokens in the KV cache; of one that decodes as it was when it joined. published: blocks of the
    chain that were offered to others. joined, due: steps at which it began and will have ended to decode.
    first_at, last_at: when its first and its latest token came.
    """

    number: int
    arrival: Arrival
    placed_at: float
    chain: list[bytes] = field(default_factory=list)
    computed: int = 0
    generated: int = 0
    cached_tokens: int | None = None
    named: list[bytes] = field(default_factory=list)
    nameless: int = 0
    published: int = 0
    joined: int = 0
    due: int = 0
    first_at: float | None = None
    last_at: float = 0.0

    def __post_init__(self) -> None:
        self.chain = split_hashes(self.arrival.chain)

    @property
    def known(self) -> int:
        return self.arrival.prompt_tokens + self.generated

    @property
    def remaining(self) -> int:
        return self.known - self.computed


class Decoding:
    """Sequences that gain one token each step. `steps` counts those since the start.

    kv_tokens: what all members have in the cache.
    """

    def __init__(self, block_size: int) -> None:
        self.steps = 0
        self.kv_tokens = 0
        self._size = block_size
        self._members: dict[int, Sequence] = {}
        self._due: list[tuple[int, int]] = []
        # by what a member's tokens are short of a whole block at step 0
        self._phases: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    @property
    def newest(self) -> Sequence | None:
        return self._members[max(self._members)] if self._members else None

    @property
    def until_end(self) -> int:
        """Steps after which the next member has said all; there is one."""
        while not self._is_due(*self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] - self.steps

    @property
    def grown(self) -> int:
        """Blocks that members took since they joined."""
        return sum(self._blocks_now(seq) - len(seq.named) - seq.nameless for seq in self)

    def join(self, sequence: Sequence) -> None:
        """Its latest token is not computed yet."""
        sequence.joined = self.steps
        self._members[sequence.number] = sequence
        sequence.due = self.steps + sequence.arrival.output_tokens - sequence.generated
        heapq.heappush(self._due, (sequence.due, sequence.number))
        self._count_phase(sequence, 1)
        self.kv_tokens += sequence.computed

    def leave(self, sequence: Sequence) -> None:
        """Brings the sequence's own counts up to date."""
        del self._members[sequence.number]
        self._count_phase(sequence, -1)
        sequence.nameless = self._blocks_now(sequence) - len(sequence.named)
        gained = self.steps - sequence.joined
        sequence.computed += gained
        sequence.generated += gained
        self.kv_tokens -= sequence.computed

    def blocks_for(self, steps: int) -> int:
        """New blocks that the next steps take."""
        size, now = self._size, self.steps
        rounds, rest = divmod(steps, size)
        needed = rounds * len(self._members)
        for phase, count in self._phases.items():
            if (-phase - now) % size < rest:
                needed += count
        return needed

    def advance(self, steps: int) -> None:
        self.steps += steps
        self.kv_tokens += steps * len(self._members)

    def take_ended(self) -> list[Sequence]:
        """Members that have said all leave."""
        ended = []
        while self._members and not self.until_end:
            sequence = self._members[heapq.heappop(self._due)[1]]
            self.leave(sequence)
            ended.append(sequence)
        return ended

    def _is_due(self, step: int, number: int) -> bool:
        """A member may have left, and may have come back since."""
        member = self._members.get(number)
        return member is not None and member.due == step

    def _blocks_now(self, sequence: Sequence) -> int:
        return -(-(sequence.computed + self.steps - sequence.joined) // self._size)

    def _count_phase(self, sequence: Sequence, change: int) -> None:
        phase = (sequence.computed - sequence.joined) % self._size
        count = self._phases.get(phase, 0) + change
        if count:
            self._phases[phase] = count
        else:
            del self._phases[phase]

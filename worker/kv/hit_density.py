"""An eviction policy that weighs how soon a block will be used again and what computing it anew would cost.

Owns the statistics of reuse and the order that follows from them; `eviction.py` says what a policy is. Knows
nothing of sequences or models but the depth at which a block's cost has doubled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

from .reuse_profile import ReuseProfile

# blocks are told apart by how often they were used again, up to this often
CLASSES = 4
# and by cost, in steps of half an octave
LEVELS = 6
# ages in half octaves, from a 32nd of the pool's size on
AGES = 20
YOUNGEST = 1 / 32
# to an older queue at most, per block that falls idle: more than grow old in that time, so that none is late
# for long, and few enough that no step waits
MOVES = 32


class HitDensity:
    """Evicts the block whose keeping earns least: hits expected per block-time, times the cost of a miss.

        worth(block) = G(reuses, age) · (1 + depth / (4 · doubling))

    Time counts blocks that fell idle, and a block's age is the time since it did. G is the Gittins index of
    the question whether to keep a block of that age: over all later ages at which one might give up, the most
    hits per time held,

        G(age) = max over end of  P(used again before end) / E[time until used again or end]

    from what was seen of blocks used again as often (`ReuseProfile`). Unlike under LRU the newest can be
    worth less than older ones: people take time to read an answer before they go on, and a pool too small for
    all who read does better to keep some until they are back. More reuse never counts as worse, and a chain
    counts as deep as its tail, so that tails still go before their heads; were a chain lost whole, its blocks
    would cost 1 + depth / (2 · doubling) on average, and half of that excess gave most hits and most time
    saved. Reuses are remembered for as many evicted contents as the pool has blocks.

    The idea of ranking by hit density is LHD's (Beckmann, Chen, Cidon, NSDI 2018), the index J. C. Gittins'
    (1979), learning from a sample of all contents, kept or not, SHARDS' (Waldspurger et al., FAST 2015).
    An operation is O(1) a block but for re-ranking the queues now and then, which does not depend on the size
    of the pool.

    doubling: blocks of depth at which attention over the past makes a block cost twice the first one;
    infinite where all cost the same.
    """

    def __init__(self, total: int, doubling: float = inf) -> None:
        widths = [total * YOUNGEST * (2 ** (age / 2) - 2 ** ((age - 1) / 2)) for age in range(1, AGES)]
        widths.insert(0, total * YOUNGEST)
        self._ends = list(accumulate(widths))
        self._profile = ReuseProfile(CLASSES, widths, sample_of=8 * total)
        self._rank_every = self._until_ranking = max(total // 4, 256)
        self._total = total
        self._doubling = doubling
        self._now = 0
        self._aged_at = 0
        # queues not looked at yet, from the last one down
        self._aging = 0
        self._names = [b""] * total
        self._reuses = [0] * total
        self._levels = [0] * total
        self._queue_of = [-1] * total
        self._since = [0] * total
        self._watched = [False] * total
        self._forgotten: OrderedDict[bytes, int] = OrderedDict()
        self._queues: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(CLASSES * LEVELS * AGES)]
        self._size = 0
        self._lowest = 0
        self._rank()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return (block for queue in self._queues for block in queue)

    def computed(self, block: int, name: bytes, depth: int) -> None:
        self._names[block] = name
        self._reuses[block] = self._forgotten.pop(name, -1) + 1
        self._levels[block] = self._level(depth)
        self._watched[block] = self._profile.watches(name)
        if self._watched[block]:
            self._profile.used(name, self._now)

    def add(self, blocks: Sequence[int]) -> None:
        level = 0
        # all of one age, so that what grows older does so with its head
        self._now += len(blocks)
        for block in blocks:
            reuses = min(self._reuses[block], CLASSES - 1)
            level = self._levels[block] = max(self._levels[block], level)
            self._since[block] = self._now
            self._put(block, (reuses * LEVELS + level) * AGES)
            if self._watched[block]:
                self._profile.idle(self._names[block], self._now, reuses)
        self._size += len(blocks)
        if self._aging or self._now - self._aged_at >= self._ends[0]:
            self._age(MOVES * (len(blocks) + 1))
        self._until_ranking -= len(blocks)
        if self._until_ranking <= 0:
            self._rank()

    def reuse(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._queues[self._queue_of[block]][block]
            self._reuses[block] += 1
            if self._watched[block]:
                self._profile.used(self._names[block], self._now)
        self._size -= len(blocks)

    def evict(self, count: int) -> list[int]:
        victims: list[int] = []
        while len(victims) < count:
            queue = self._queues[self._ranking[self._lowest]]
            if queue:
                victims.append(queue.popitem(last=False)[0])
            else:
                self._lowest += 1
        for block in victims:
            self._forgotten[self._names[block]] = self._reuses[block]
            if len(self._forgotten) > self._total:
                self._forgotten.popitem(last=False)
        self._size -= count
        return victims

    def clear(self) -> list[int]:
        blocks = list(self)
        for queue in self._queues:
            queue.clear()
        self._size = 0
        return blocks

    def _level(self, depth: int) -> int:
        return bisect_right(_LEVEL_COSTS, 1 + depth / (4 * self._doubling))

    def _put(self, block: int, queue: int) -> None:
        self._queues[queue][block] = None
        self._queue_of[block] = queue
        self._lowest = min(self._lowest, self._rank_of[queue])

    def _age(self, moves: int) -> None:
        """Move blocks that have grown older to the queues of their age, oldest first, while `moves` last."""
        if not self._aging:
            self._aging, self._aged_at = len(self._queues), self._now
        while self._aging and moves > 0:
            number = self._aging - 1
            moves -= self._age_queue(number, moves)
            self._aging -= moves > 0

    def _age_queue(self, number: int, moves: int) -> int:
        """Returns how many blocks were moved, `moves` at most."""
        queue, age = self._queues[number], number % AGES
        moved = 0
        while queue and age < AGES - 1 and moved < moves:
            block = next(iter(queue))
            grown = self._now - self._since[block]
            if grown < self._ends[age]:
                break
            del queue[block]
            self._put(block, number - age + min(bisect_right(self._ends, grown), AGES - 1))
            moved += 1
        return moved

    def _rank(self) -> None:
        """Order the queues by worth; of equals the less reused first, then the cheaper, then the older."""
        self._until_ranking = self._rank_every
        densities = self._profile.densities(self._now)

        def worth(queue: int) -> tuple[float, int, int, int]:
            rest, age = divmod(queue, AGES)
            reuses, level = divmod(rest, LEVELS)
            return densities[reuses][age] * 2 ** (level / 2), reuses, level, -age

        self._ranking = sorted(range(len(self._queues)), key=worth)
        self._rank_of = [0] * len(self._queues)
        for rank, queue in enumerate(self._ranking):
            self._rank_of[queue] = rank
        self._lowest = 0


# from where on a cost belongs to the next level: half way, in octaves
_LEVEL_COSTS = [2 ** ((level + 0.5) / 2) for level in range(LEVELS - 1)]

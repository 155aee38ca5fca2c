"""After how long contents are used again, learned from a sample of them, whether they were kept or not.

Owns the sample, its histograms, and the density of hits that follows from them. Knows nothing of blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

# contents watched at once; what leaves unseen counts as not used again until then
SAMPLE = 4096
# events after which older ones count half
MEMORY = 4096
# reuse that is assumed before any was seen: equally likely in each octave, so that recency decides
PRIOR_HAZARD, PRIOR_WEIGHT = 0.05, 8.0


class ReuseProfile:
    """Ages are in units of the caller's clock, and counted in buckets of the given widths.

    sample_of: how many contents the sample should stand for.
    """

    def __init__(self, classes: int, widths: Sequence[float], *, sample_of: int) -> None:
        self._widths = widths
        self._ends = list(accumulate(widths))
        self._threshold = min(1.0, SAMPLE / sample_of) * 2**32
        self._watched: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._hits = [[0.0] * len(widths) for _ in range(classes)]
        self._lost = [[0.0] * len(widths) for _ in range(classes)]
        self._events = 0

    def watches(self, name: bytes) -> bool:
        """Whether a content is in the sample; the others need not be told of."""
        return int.from_bytes(name[:4], "little") < self._threshold

    def idle(self, name: bytes, now: int, kind: int) -> None:
        """A content of this class fell idle."""
        self._watched[name] = (now, kind)
        self._watched.move_to_end(name)
        if len(self._watched) > SAMPLE:
            _, (since, lost) = self._watched.popitem(last=False)
            self._count(self._lost[lost], now - since)

    def used(self, name: bytes, now: int) -> None:
        """A content is used, again if it was ever seen."""
        watched = self._watched.pop(name, None)
        if watched is not None:
            self._count(self._hits[watched[1]], now - watched[0])

    def densities(self, now: int) -> list[list[float]]:
        """Per class and age bucket: the most hits per time that holding on from there can give."""
        hits, ended = self._hits, [[*lost] for lost in self._lost]
        for since, kind in self._watched.values():
            ended[kind][self._bucket(now - since)] += 1
        prior = [PRIOR_HAZARD] * len(self._widths)
        pooled = _hazards(_summed(hits), _summed(ended), prior)
        best = [0.0] * len(self._widths)
        found = []
        for own_hits, own_ended in zip(hits, ended, strict=True):
            density = self._density(_hazards(own_hits, own_ended, pooled))
            best = [max(pair) for pair in zip(best, density, strict=True)]
            found.append(best)
        return found

    def _density(self, hazards: Sequence[float]) -> list[float]:
        """The Gittins index of each bucket: the best rate over all buckets at which to give up."""
        indices = []
        for first in range(len(hazards)):
            alive, held, hit, best = 1.0, 0.0, 0.0, 0.0
            for hazard, width in zip(hazards[first:], self._widths[first:], strict=True):
                held += alive * width * (1 - hazard / 2)
                hit += alive * hazard
                alive *= 1 - hazard
                best = max(best, hit / held)
            indices.append(best)
        return indices

    def _bucket(self, age: int) -> int:
        return min(bisect_right(self._ends, age), len(self._ends) - 1)

    def _count(self, histogram: list[float], age: int) -> None:
        histogram[self._bucket(age)] += 1
        self._events += 1
        if self._events >= MEMORY:
            self._events //= 2
            for table in (*self._hits, *self._lost):
                table[:] = [count / 2 for count in table]


def _hazards(hits: Sequence[float], lost: Sequence[float], prior: Sequence[float]) -> list[float]:
    """Per bucket, the share of those that reached it unused that are used in it (Kaplan and Meier).

    lost: went out of sight in that bucket, half of it through on average.
    """
    reached, hazards = 0.0, []
    for hit, gone, expected in zip(reversed(hits), reversed(lost), reversed(prior), strict=True):
        at_risk = reached + hit + gone / 2
        hazards.append((hit + PRIOR_WEIGHT * expected) / (at_risk + PRIOR_WEIGHT))
        reached += hit + gone
    return hazards[::-1]


def _summed(histograms: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*histograms, strict=True)]

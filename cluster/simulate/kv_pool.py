"""KV memory of a simulated worker, in whole blocks: which contents are in use, which are cached, LRU.

Contents stand for blocks, so that accounts need no block numbers; blocks whose content nobody can ask for
(partial ones, answers) are only counted. Knows nothing of sequences or time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class KvPool:
    """stored, removed: news since they were last taken, for the prefix directory."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.stored: list[bytes] = []
        self.removed: list[bytes] = []
        self._refs: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._nameless = 0

    @property
    def used(self) -> int:
        return len(self._refs) + self._nameless

    @property
    def cached(self) -> int:
        """Idle but findable."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Free or idle."""
        return self.total - self.used

    def leading(self, chain: Sequence[bytes]) -> tuple[int, int]:
        """(blocks, idle among them) of the longest prefix held; nothing is taken."""
        refs, idle = self._refs, self._idle
        found = revived = 0
        for name in chain:
            if name in idle:
                revived += 1
            elif name not in refs:
                break
            found += 1
        return found, revived

    def share(self, names: Iterable[bytes]) -> None:
        """Take a reference on contents that are held."""
        refs, idle = self._refs, self._idle
        for name in names:
            if name in refs:
                refs[name] += 1
            else:
                del idle[name]
                refs[name] = 1

    def allocate(self, count: int) -> None:
        """Nameless blocks, at the cost of what has been idle longest; there must be so many available."""
        assert count <= self.available, "more blocks than there are"
        self._nameless += count
        for _ in range(self.used + len(self._idle) - self.total):
            self.removed.append(self._idle.popitem(last=False)[0])

    def publish(self, names: Iterable[bytes]) -> list[bytes]:
        """Nameless blocks are full: let others find them. Returns those that have no twin yet; a block with
        a twin stays nameless."""
        refs, idle = self._refs, self._idle
        fresh = [name for name in names if name not in refs and name not in idle]
        refs.update(dict.fromkeys(fresh, 1))
        self._nameless -= len(fresh)
        self.stored += fresh
        return fresh

    def release(self, names: Sequence[bytes], nameless: int) -> None:
        """Last block first: a prefix is worth more than its tail."""
        refs, idle = self._refs, self._idle
        for name in reversed(names):
            left = refs[name] - 1
            if left:
                refs[name] = left
            else:
                del refs[name]
                idle[name] = None
        self._nameless -= nameless

    def take_news(self) -> tuple[list[bytes], list[bytes]]:
        """(removed, stored), in this order: what came back counts as held."""
        removed, stored = self.removed, self.stored
        if removed and stored:
            removed = [name for name in removed if not self._holds(name)]
            stored = [name for name in stored if self._holds(name)]
        self.removed, self.stored = [], []
        return removed, stored

    def check_integrity(self, named: Iterable[Sequence[bytes]], nameless: int) -> None:
        """named, nameless: all blocks of all sequences. Raises AssertionError."""
        counts: dict[bytes, int] = {}
        for names in named:
            for name in names:
                counts[name] = counts.get(name, 0) + 1
        assert counts == self._refs, "reference counts differ from what sequences hold"
        assert nameless == self._nameless, "nameless blocks lost"
        assert not self._refs.keys() & self._idle.keys(), "a content is in use and idle"
        assert self.used + self.cached <= self.total, "more blocks than there are"

    def _holds(self, name: bytes) -> bool:
        return name in self._refs or name in self._idle

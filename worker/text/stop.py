"""Stop strings, found in text that comes in pieces; part of one is never given out.

The match that is complete first wins, since generation ends there; of those that end together, the longest.
How the text was cut into pieces makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Searches one text for several stop strings at once, in time linear in the text."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """include: the matched stop string itself is part of what is given out."""
        self._stops = tuple(dict.fromkeys(stops))
        self._fallbacks = [_fallback_table(stop) for stop in self._stops]
        self._include = include
        # per stop string, how many of its characters the text so far ends with
        self._lengths = [0] * len(self._stops)
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, str | None]:
        """What may be given out now, and the stop string that was found. After a match nothing follows."""
        if self._matched:
            return "", None
        if not self._stops:
            return text, None
        for i, character in enumerate(text):
            if stop := self._advance(character):
                self._matched = True
                known = self._held + text[: i + 1]
                self._held = ""
                return known if self._include else known[: -len(stop)], stop
        known = self._held + text
        cut = len(known) - max(self._lengths)
        self._held = known[cut:]
        return known[:cut], None

    def flush(self) -> str:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """One step of Knuth, Morris and Pratt for each stop string; gives the longest that is complete."""
        found: str | None = None
        for i, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            length = self._lengths[i]
            while length and stop[length] != character:
                length = fallback[length]
            length += stop[length] == character
            self._lengths[i] = length
            if length == len(stop) and len(stop) > len(found or ""):
                found = stop
        return found


# the sequences of one request have the same stop strings, and so do most requests of a client
@lru_cache(maxsize=256)
def _fallback_table(stop: str) -> tuple[int, ...]:
    """For each matched length the longest shorter prefix of `stop` that the matched part also ends with."""
    table = [0, 0]
    for character in stop[1:]:
        length = table[-1]
        while length and stop[length] != character:
            length = table[length]
        table.append(length + (stop[length] == character))
    return tuple(table)

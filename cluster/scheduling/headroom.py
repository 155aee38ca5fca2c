"""How much a tenant beyond its share leaves free for the others. Pure.

Order alone does not keep a small tenant's waits short: seats come free a few at a time, and each would go to
the large tenant while the small one has nothing waiting. Knows neither who asks nor which worker has room.
"""

from __future__ import annotations

from math import ceil, sqrt

# of who comes by chance while no seat comes free, nearly all find one; 2 left 4 to 7 % waiting (0026)
_DEVIATIONS = 3.0


def kept_free(claims: float, step_s: float, interval_s: float, places: float, most: float) -> int:
    """Sequences' worth of room to leave free.

    claims: sequences per second that others ask for who have less. step_s: seats come free at the end of
    steps; interval_s: and so long after each other. places: sequences that fit in all; `most` of them, a
    fraction, are kept at most.
    """
    expected = claims * (step_s + interval_s)
    return min(round(most * places), max(1, ceil(expected + _DEVIATIONS * sqrt(expected))))

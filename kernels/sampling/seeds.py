"""Integer mixing shared by host and device: seeds of sequences, keys of the noise. No torch.

Constants: a Weyl sequence (Steele et al. 2014) and a 32-bit finaliser (Wellons 2018).
"""

from __future__ import annotations

MASK32 = 0xFFFFFFFF
WEYL = 0x9E3779B9
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B


def child_seed(seed: int, index: int) -> int:
    """Seed of the index-th sequence of a request; the first keeps the request's own."""
    if index == 0:
        return seed
    low = mix_int(seed ^ mix_int(index * WEYL))
    return mix_int((seed >> 32) ^ low) << 32 | low


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Two words for the two rounds of mixing. Tokens step by WEYL from the first, so the second must not be
    such a step away: the rounds would cancel each other for one token."""
    low = mix_int(seed + WEYL)
    both = mix_int(low ^ mix_int((seed >> 32) + 2 * WEYL))
    first = mix_int(both ^ mix_int(position + 3 * WEYL))
    return first, mix_int(first ^ MIX_2)


def mix_int(x: int) -> int:
    """32-bit finaliser: every input bit changes every output bit with probability near one half."""
    x &= MASK32
    x ^= x >> 16
    x = x * MIX_1 & MASK32
    x ^= x >> 15
    x = x * MIX_2 & MASK32
    return x ^ x >> 16

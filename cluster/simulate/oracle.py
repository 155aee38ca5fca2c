"""The best that placement could do for the caches: all workers' memory as one, and nobody in the way.

One LRU over the pooled memory, or a cache without end; requests come one after another and leave their
prompts behind at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from decodefleet.worker.kv.hashing import split_hashes

from .arrivals import Arrival
from .kv_pool import KvPool


def pooled_hit_rate(arrivals: Sequence[Arrival], block_size: int, blocks: int | None) -> float:
    """Share of prompt tokens found; blocks: of the pool, None for one without end."""
    if blocks is None:
        blocks = sum(arrival.prompt_tokens // block_size + 1 for arrival in arrivals)
    pool = KvPool(blocks)
    found_tokens = 0
    for arrival in arrivals:
        chain = split_hashes(arrival.chain)
        found, _ = pool.leading(chain)
        # one token at least is computed
        found_tokens += min(found, (arrival.prompt_tokens - 1) // block_size) * block_size
        held = chain[:found]
        pool.share(held)
        missing = min(len(chain) - found, pool.available)
        pool.allocate(missing)
        held += pool.publish(chain[found : found + missing])
        pool.release(held, 0)
        pool.take_news()
    return found_tokens / max(1, sum(arrival.prompt_tokens for arrival in arrivals))

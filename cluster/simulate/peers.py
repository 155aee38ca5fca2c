"""The routing policies of peers, as formulas over the same snapshots, each with its documented defaults.

For comparison in simulation only. They see what our scheduler knows (an exact index of blocks, reservations
counted at dispatch), which is more than most of them have; and they bind early: a request goes to a worker at
once and waits there, since none of them holds it back by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ..scheduling.policy import Hits, least
from ..scheduling.view import NO_HIT, Demand, WorkerView


class SglangCacheAware:
    """SGLang's router, policy cache_aware (sglang_router 0.3.2: cache_threshold 0.3,
    balance_abs_threshold 64, balance_rel_threshold 1.5).

    Where max - min > 64 and max > 1.5 · min, counted in running requests: the least loaded. Else, where more
    than 0.3 of the prompt matches, the best match; else the least loaded (before 2026 the smallest tree).
    """

    name = "sglang"

    def __init__(self, cache_threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5) -> None:
        self._threshold, self._abs, self._rel = cache_threshold, balance_abs, balance_rel

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> WorkerView:
        loads = [view.load.sequences for view in views]
        low, high = min(loads), max(loads)
        if high - low > self._abs and high > self._rel * low:
            return least(views, loads, rng)
        cached = [_cached_tokens(view, demand, hits) for view in views]
        if max(cached) > self._threshold * demand.prompt_tokens:
            return least(views, [-tokens for tokens in cached], rng)
        return least(views, loads, rng)


class DynamoKv:
    """NVIDIA Dynamo's KV router (1.6, lib/kv-router/src/scheduling/selector/default.rs) with its defaults
    (overlap credit 1, prefill load scale 1, temperature 0): least of

        max(0, active prefill blocks + prompt blocks - overlap blocks) + potential decode blocks

    in blocks of 16 tokens; ties fall at random. Potential decode blocks are those active on the worker and
    the request's own; answers are counted as they grow, here by half of what is expected.
    """

    name = "dynamo"
    block = 16

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> WorkerView:
        return least(views, [self.cost(view, demand, hits) for view in views], rng)

    def cost(self, view: WorkerView, demand: Demand, hits: Hits) -> float:
        cached = _cached_tokens(view, demand, hits)
        prefill = max(0, view.load.prefill_tokens + demand.prompt_tokens - cached) / self.block
        decode = (view.load.kv_tokens + demand.prompt_tokens) / self.block
        return prefill + decode


class LlmdScorers:
    """llm-d's router (llm-d-router, sample configuration): the highest weighted sum of scores in [0, 1],

        2 · matched / total  +  1 · (1 - KV utilisation)  +  1 · (max queue - queue) / (max - min)

    with ties at random (max-score-picker). Queue and utilisation are what workers reported last, as llm-d
    scrapes them; the queue's score is 1 for all where all are equal.
    """

    name = "llm-d"

    def __init__(self, prefix: float = 2.0, kv: float = 1.0, queue: float = 1.0) -> None:
        self._weights = prefix, kv, queue

    def choose(self, views: Sequence[WorkerView], demand: Demand, hits: Hits, rng: Random) -> WorkerView:
        queues = [view.stats.waiting for view in views]
        low, high = min(queues), max(queues)
        scores = [self.score(view, demand, hits, low, high) for view in views]
        return least(views, [-score for score in scores], rng)

    def score(self, view: WorkerView, demand: Demand, hits: Hits, shortest: int, longest: int) -> float:
        """shortest, longest: queue among the candidates."""
        stats = view.stats
        free = (stats.free_blocks + stats.cached_blocks) / max(1, stats.total_blocks)
        spread = longest - shortest
        queue = (longest - stats.waiting) / spread if spread else 1.0
        prefix, kv, waiting = self._weights
        matched = _cached_tokens(view, demand, hits) / demand.prompt_tokens
        return prefix * matched + kv * free + waiting * queue


def _cached_tokens(view: WorkerView, demand: Demand, hits: Hits) -> int:
    return view.cached_tokens(demand, hits.get(view.key, NO_HIT))

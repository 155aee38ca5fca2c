"""The engine: one model replica, advanced one iteration at a time.

A step is a sentence: plan, run, sample, commit, emit. The batcher plans, the KV manager gives blocks, the
runner computes; this module keeps requests, applies what was sampled, and reports. One thread drives it.

Where the device works beside the host, the next step is planned and launched while one runs, and each step's
tokens are read after that: what depends on their values, above all who stops, is applied one step late.
Knows nothing of sockets, routers, text or the scheduler.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from .admission import admit
from .assets.plan import attention_doubling
from .batcher import Batcher, StepPlan
from .config import CacheConfig, EngineConfig
from .engine_api import Progress, Refused
from .kv.block_pool import BlockPool
from .kv.eviction import EvictionPolicy, make_policy
from .kv.manager import KvManager
from .kv.tiers.neighbours import MakeNeighbours
from .kv.tiers.opening import open_tiers
from .loading import LoadedModel, load
from .parallel.gang import OnLoss, ignore_loss
from .peers.links import PeerLinks
from .peers.peers import Peers
from .protocol import EventSink, FinishReason, ModelCard, StepTime, Submit, TokenDelta, WorkerStats
from .runner.step import PendingStep, Sampled
from .sequence import Request, Sequence, State

# how long the engine sleeps at most where all there is to do is to wait for a copy
IDLE_S = 0.001


@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    step: PendingStep
    began: float


class Engine:
    """See `engine_api.EngineLike`. Raises ModelError where the model cannot be loaded or does not fit."""

    def __init__(
        self,
        config: EngineConfig,
        sink: EventSink,
        progress: Progress,
        on_loss: OnLoss = ignore_loss,
        peers: PeerLinks | None = None,
    ) -> None:
        """on_loss: told by another thread of the loss of a rank, after which no step can be computed.

        peers: links to other workers, closed with this; with several ranks there are none.
        """
        self._config = config
        self._model: LoadedModel = load(config, progress, on_loss)
        self._runner = self._model.runner
        self._pool = BlockPool(self._model.blocks, sink, _eviction(config.cache, self._model))
        self._tiers = open_tiers(
            config.cache,
            self._runner.kv.slabs,
            self._pool,
            sink,
            self._model.card.hash_root,
            self._runner.stores,
            make_peers=None if peers is None else self._make_peers(peers),
        )
        if self._tiers is not None:
            self._pool.kept_below = self._tiers.holds
        self._kv = KvManager(
            self._pool,
            config.cache.block_size,
            self._runner.groups,
            prefix_caching=config.cache.enable_prefix_caching,
            max_chunk=config.batch.max_num_batched_tokens,
            tiers=self._tiers,
        )
        self._batcher = Batcher(config.batch, self._kv)
        self._requests: dict[tuple[str, int], Request] = {}
        self._arrivals = 0
        self._in_flight: deque[_InFlight] = deque()
        self._last_read = 0.0
        self._deltas: list[TokenDelta] = []
        self._finished: Counter[str] = Counter()
        self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._stats = WorkerStats()
        self._note_stats()

    def _make_peers(self, links: PeerLinks) -> MakeNeighbours:
        root, gbps = self._model.card.hash_root, self._config.cache.kv_peer_gbps
        return partial(Peers, links, root=root, gbps=gbps)

    @property
    def card(self) -> ModelCard:
        return self._model.card

    @property
    def total_blocks(self) -> int:
        return self._pool.total

    def submit(self, request: Submit) -> None:
        if len(self._batcher.waiting) >= self._config.batch.max_waiting:
            raise Refused("queue_full", f"{len(self._batcher.waiting)} sequences wait already")
        admitted = admit(request, self.card, arrival=self._arrivals)
        if admitted.key in self._requests:
            return
        self._arrivals += 1
        self._requests[admitted.key] = admitted
        for seq in admitted.live:
            # the others share the blocks of the first
            if seq not in admitted.unborn:
                if request.peer is not None:
                    self._kv.offer(seq, request.peer)
                self._batcher.add(seq)
        self._note_stats()

    def abort(self, request_id: str, attempt: int, index: int | None = None) -> None:
        request = self._requests.get((request_id, attempt))
        if request is None:
            return
        for seq in [*request.live]:
            if index is None or seq.index == index:
                self._finish(seq, "abort")
        self._note_stats()

    def has_work(self) -> bool:
        return bool(self._requests or self._in_flight or (self._tiers is not None and self._tiers.busy))

    def step(self) -> list[TokenDelta]:
        if self._tiers is not None:
            self._tiers.poll()
        plan = self._batcher.plan()
        if self._tiers is not None:
            self._tiers.dispatch()
        if plan.chunks:
            self._launch(plan)
        # with nothing to launch, what is in flight is all that can bring news
        if self._in_flight and (len(self._in_flight) >= self._runner.depth or not plan.chunks):
            self._commit(self._in_flight.popleft())
        elif self._tiers is not None and not plan.chunks:
            self._tiers.poll(IDLE_S)
        self._note_stats()
        deltas, self._deltas = self._deltas, []
        return deltas

    def stats(self) -> WorkerStats:
        return self._stats

    def check_integrity(self) -> None:
        self._batcher.check_integrity()
        requests = self._requests.values()
        live = {id(seq) for request in requests for seq in request.live if seq not in request.unborn}
        held = {id(seq) for seq in (*self._batcher.running, *self._batcher.waiting)}
        assert live == held, "requests and batcher disagree about who is alive"

    def reset_prefix_cache(self) -> int:
        """Forget all cached blocks that nobody uses, in all tiers; returns how many."""
        below = 0 if self._tiers is None else self._tiers.clear()
        return self._pool.clear_cache() + below

    def close(self) -> None:
        for request_id, attempt in [*self._requests]:
            self.abort(request_id, attempt)
        self._in_flight.clear()
        if self._tiers is not None:
            self._tiers.close()
        self._runner.close()

    def _launch(self, plan: StepPlan) -> None:
        """Start a step; its tokens count as computed, and what it samples as pending, from here on."""
        began = time.perf_counter()
        self._in_flight.append(_InFlight(plan, self._runner.submit(plan), began))
        for chunk in plan.chunks:
            seq = chunk.seq
            if seq.began is None:
                seq.began = began
            self._prompt_tokens += max(min(chunk.start + chunk.count, seq.prompt_len) - chunk.start, 0)
            seq.computed += chunk.count
            self._kv.commit(seq)
            if chunk.samples:
                if seq.request.unborn:
                    self._fork(seq)
                seq.pending += 1

    def _commit(self, done: _InFlight) -> None:
        """Apply a step once it has run: prompt scores, then what was sampled."""
        result = done.step.result()
        for chunk in done.plan.chunks:
            # a prompt that is computed again is scored again
            if chunk.start == 0:
                chunk.seq.prompt_logprobs.clear()
        for seq, scores in result.scored:
            seq.prompt_logprobs += scores
        for seq, sampled in result.sampled:
            seq.pending -= 1
            # the extra token of a sequence that ended while it was computed is nobody's
            if seq.state is not State.FINISHED:
                self._append(seq, sampled)
        self._learn(done)

    def _fork(self, head: Sequence) -> None:
        """The prompt's last step is launched, first tokens for all with it: siblings share all blocks."""
        siblings, head.request.unborn = head.request.unborn, []
        for seq in siblings:
            seq.pending += 1
            if self._batcher.has_room:
                self._kv.fork(head, seq)
                self._batcher.start_forked(seq)
            else:
                self._batcher.add(seq)

    def _append(self, seq: Sequence, sampled: Sampled) -> None:
        """Take a sampled token, emit it, and end the sequence where it says so."""
        request, token = seq.request, sampled.token
        if request.max_tokens == 0:
            self._emit(seq, (), finish_reason="length")
            self._finish(seq, "length")
            return
        seq.tokens.append(token)
        self._kv.commit(seq)
        self._generated_tokens += 1
        reason = request.finish_reason(token, len(seq.tokens) - seq.prompt_len)
        logprobs = None if sampled.logprobs is None else (sampled.logprobs,)
        self._emit(
            seq,
            (token,),
            logprobs=logprobs,
            finish_reason=reason,
            stop_token=token if reason == "stop" else None,
        )
        if reason is not None:
            self._finish(seq, reason)

    def _emit(self, seq: Sequence, tokens: tuple[int, ...], **fields: Any) -> None:
        # the first delta also tells what the cache supplied and how the prompt scored
        if not seq.emitted:
            seq.emitted = True
            fields["cached_tokens"] = seq.cached_tokens or 0
            if seq.began is not None:
                fields["queued_s"] = seq.began - seq.request.arrived
            if seq.request.params.prompt_logprobs is not None and seq.index == 0:
                fields["prompt_logprobs"] = tuple(seq.prompt_logprobs)
        request_id, attempt = seq.request.key
        self._deltas.append(
            TokenDelta(request_id=request_id, attempt=attempt, index=seq.index, tokens=tokens, **fields)
        )

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Out of the batcher, blocks back, and out of the request."""
        request = seq.request
        request.live.remove(seq)
        self._finished[reason] += 1
        if seq in request.unborn:
            request.unborn.remove(seq)
        else:
            self._batcher.remove(seq)
            if request.unborn:
                # gone before its prompt was computed: the next one computes it
                self._batcher.add(request.unborn.pop(0))
        if not request.live:
            del self._requests[request.key]

    def _learn(self, done: _InFlight) -> None:
        """A step has the device to itself from its launch or from the end of the one before it."""
        now, plan = time.perf_counter(), done.plan
        seconds, self._last_read = now - max(done.began, self._last_read), now
        self._steps += 1
        decodes = sum(chunk.count == 1 for chunk in plan.chunks)
        read = self._runner.groups.tokens_read
        kv_tokens = sum(read(chunk.start + chunk.count) for chunk in plan.chunks)
        self._model.step_time.observe(seconds, plan.tokens - decodes, kv_tokens, decodes)

    def _note_stats(self) -> None:
        """A new snapshot, swapped in whole: other threads read it at any time."""
        batcher, pool = self._batcher, self._pool
        live = [*batcher.running, *batcher.waiting]
        step_time = self._stats.step_time
        # the fit is a 4×4 solve, cheap beside a step, but needless after each
        if step_time is None or self._steps % 8 == 0:
            batcher.step_time = step_time = self._model.step_time.fitted()
            self._judge_tiers(step_time)
        self._stats = WorkerStats(
            running=len(batcher.running),
            waiting=len(batcher.waiting),
            max_running=self._config.batch.max_num_seqs,
            max_step_tokens=self._config.batch.max_num_batched_tokens,
            waiting_prefill_tokens=sum(seq.remaining for seq in live if not seq.decoding),
            running_kv_tokens=sum(self._runner.groups.tokens_read(seq.computed) for seq in batcher.running),
            total_blocks=pool.total,
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            steps=self._steps,
            step_time=step_time,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_query_tokens=self._kv.query_tokens,
            prefix_hit_tokens=self._kv.hit_tokens,
            preemptions=batcher.preemptions,
            evicted_blocks=pool.evictions,
            finished=dict(self._finished),
            lost_blocks=pool.lost,
            restoring=sum(seq.restoring for seq in batcher.running),
            swapped=self._kv.swapped,
            tiers={} if self._tiers is None else self._tiers.stats(),
            tier_stall_s=0.0 if self._tiers is None else self._tiers.stall_s,
        )

    def _judge_tiers(self, step_time: StepTime) -> None:
        """Tell the tiers what computing costs, to which they compare bringing back."""
        if self._tiers is not None:
            self._tiers.learn(step_time.prefill_token * self._config.cache.block_size)


def _eviction(config: CacheConfig, model: LoadedModel) -> EvictionPolicy:
    doubling = attention_doubling(model.info) / config.block_size
    return make_policy(config.eviction_policy, model.blocks, doubling)

"""An engine that speaks the real protocol and keeps real block accounts, but computes nothing. Torch-free.

Real are the accounts of the main pool: references, prefix hits, eviction, preemption, and the news of them.
There is nothing below the pool: no tiers, and it neither lends blocks to peers nor fetches from them.

For tests of everything around an engine. Its text is an echo: token p of a sequence is a pure function of
(prompt, seed, index, p), so that resumed or moved sequences can be compared, and ends after one round of
the prompt. Steps take the time that FakeConfig says.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from hashlib import blake2b

from .assets.checkpoint import read_config
from .config import EngineConfig, FakeConfig
from .engine_api import Progress, Refused
from .fake_pool import FakePool
from .kv.hashing import extend_chain, hash_root, request_root, split_hashes, unpack_tokens
from .protocol import (
    EventSink,
    FinishReason,
    ModelCard,
    StepTime,
    Submit,
    TokenDelta,
    TokenLogprobs,
    WorkerStats,
)
from .sampling_params import InvalidRequest


@dataclass(eq=False, slots=True)
class FakeSequence:
    """One sequence: prompt and output tokens, of which the first `computed` have KV in `blocks`."""

    submit: Submit
    index: int
    tokens: list[int]
    prompt_len: int
    root: bytes
    echo: list[int]
    start: int
    chain: list[bytes]
    max_tokens: int
    computed: int = 0
    cached: int | None = None
    blocks: list[int] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    queued_s: float | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def trailing(self) -> int:
        return len(self.tokens) - self.computed


class FakeEngine:
    """See `engine_api.EngineLike`."""

    def __init__(self, config: EngineConfig, fake: FakeConfig, sink: EventSink, progress: Progress) -> None:
        progress("pretending to load", 0.0)
        self._fake = fake
        self._batch = config.batch
        self._caching = config.cache.enable_prefix_caching
        self.total_blocks = config.cache.num_gpu_blocks_override or fake.total_blocks
        self.card = _card(config, self.total_blocks)
        self._pool = FakePool(self.total_blocks, sink)
        self._waiting: deque[FakeSequence] = deque()
        self._running: list[FakeSequence] = []
        self._finished: Counter[str] = Counter()
        self._steps = self._prompt_tokens = self._generated = self._preemptions = 0
        self._queried = self._hits = 0
        self._stats = WorkerStats()
        self._note_stats()
        progress("pretending to load", 1.0)

    def submit(self, request: Submit) -> None:
        prompt = unpack_tokens(request.prompt)
        params = request.params
        limit = self.card.max_model_len
        if not prompt:
            raise InvalidRequest("prompt", "must have at least one token")
        if max(prompt) >= self.card.vocab_size:
            raise InvalidRequest("prompt", f"token ids must be below {self.card.vocab_size}")
        if len(prompt) >= limit:
            raise InvalidRequest("prompt", f"{len(prompt)} tokens leave no room in {limit}")
        if len(self._waiting) + params.n > max(self._batch.max_waiting, params.n):
            raise Refused("queue_full", f"{len(self._waiting)} sequences wait already")
        self._waiting.extend(self._sequence(request, prompt, index) for index in request.live)
        self._note_stats()

    def abort(self, request_id: str, attempt: int, index: int | None = None) -> None:
        for sequence in [*self._waiting, *self._running]:
            submit = sequence.submit
            wanted = index is None or index == sequence.index
            if submit.request_id == request_id and submit.attempt == attempt and wanted:
                self._end(sequence, "abort")
        self._note_stats()

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[TokenDelta]:
        began = time.monotonic()
        if self._steps == self._fake.hang_after:
            threading.Event().wait()
        chunks = self._plan()
        deltas: list[TokenDelta] = []
        for sequence, take in chunks:
            self._compute(sequence, take)
            if not sequence.trailing:
                deltas.append(self._sample(sequence))
        prefilled = sum(take for _, take in chunks if take > 1)
        self._steps += 1
        self._pass_time(began, prefilled, len(deltas))
        self._note_stats()
        return deltas

    def stats(self) -> WorkerStats:
        return self._stats

    def check_integrity(self) -> None:
        held = [block for sequence in (*self._waiting, *self._running) for block in sequence.blocks]
        self._pool.check_integrity(held)

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def _sequence(self, request: Submit, prompt: list[int], index: int) -> FakeSequence:
        params, size = request.params, self.card.block_size
        resumed = request.resume[index] if request.resume else ()
        root = request_root(self.card.hash_root, cache_salt=request.cache_salt)
        chain = split_hashes(request.block_hashes)
        if request.hash_root != self.card.hash_root or len(chain) != len(prompt) // size:
            chain = extend_chain(root, prompt, size)
        known = [*prompt, *resumed]
        chain += extend_chain(chain[-1] if chain else root, known[len(chain) * size :], size)
        room = self.card.max_model_len - len(prompt)
        ends = {*self.card.eos_token_ids, *params.stop_token_ids}
        return FakeSequence(
            submit=request,
            index=index,
            tokens=known,
            prompt_len=len(prompt),
            root=root,
            echo=[token for token in prompt if token not in ends] or [_digest(prompt) % self.card.vocab_size],
            start=0 if params.greedy else _digest([params.seed or 0, index]),
            chain=chain,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
        )

    def _plan(self) -> list[tuple[FakeSequence, int]]:
        """Who computes how many tokens in this step: decodes first, for they trail by one, newcomers last."""
        budget = self._batch.max_num_batched_tokens
        preemptions = self._preemptions
        chunks: list[tuple[FakeSequence, int]] = []
        for sequence in sorted(self._running, key=lambda sequence: sequence.trailing > 1):
            budget -= self._schedule(sequence, budget, chunks)
        if self._preemptions == preemptions:
            while budget and (newcomer := self._admit()) is not None:
                budget -= self._schedule(newcomer, budget, chunks)
        # who was preempted for another
        return [chunk for chunk in chunks if chunk[0] in self._running]

    def _schedule(self, sequence: FakeSequence, budget: int, chunks: list[tuple[FakeSequence, int]]) -> int:
        take = min(sequence.trailing, budget)
        if take == 0 or sequence not in self._running or not self._make_room(sequence, take):
            return 0
        chunks.append((sequence, take))
        return take

    def _admit(self) -> FakeSequence | None:
        """The oldest that waits starts, if its prompt fits."""
        if not self._waiting or len(self._running) >= self._batch.max_num_seqs:
            return None
        sequence, size = self._waiting[0], self.card.block_size
        if self._caching and sequence.submit.params.prompt_logprobs is None:
            # one token at least is computed, for there is something to sample from
            sequence.blocks = self._pool.match(sequence.chain[: (len(sequence.tokens) - 1) // size])
        # each running sequence may need a block in its next steps
        needed = -(-len(sequence.tokens) // size) - len(sequence.blocks) + len(self._running)
        if self._pool.available < needed:
            self._pool.release(sequence.blocks)
            sequence.blocks = []
            return None
        self._waiting.popleft()
        sequence.computed = len(sequence.blocks) * size
        self._queried += len(sequence.tokens)
        self._hits += sequence.computed
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_len)
            sequence.queued_s = time.monotonic() - sequence.arrived
        self._running.append(sequence)
        return sequence

    def _make_room(self, sequence: FakeSequence, take: int) -> bool:
        """Blocks for `take` more tokens; younger sequences are preempted for them, never an older one."""
        needed = -(-(sequence.computed + take) // self.card.block_size)
        while len(sequence.blocks) < needed:
            block = self._pool.allocate()
            if block is not None:
                sequence.blocks.append(block)
                continue
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: FakeSequence) -> None:
        self._running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0
        self._waiting.appendleft(sequence)
        self._preemptions += 1

    def _compute(self, sequence: FakeSequence, take: int) -> None:
        size = self.card.block_size
        full_before = sequence.computed // size
        sequence.computed += take
        for number in range(full_before, sequence.computed // size):
            if number >= len(sequence.chain):
                parent = sequence.chain[-1] if sequence.chain else sequence.root
                tokens = sequence.tokens[number * size : (number + 1) * size]
                sequence.chain += extend_chain(parent, tokens, size)
            if self._caching:
                self._pool.publish(sequence.blocks[number], sequence.chain[number])

    def _sample(self, sequence: FakeSequence) -> TokenDelta:
        params, position = sequence.submit.params, sequence.generated
        first = sequence.cached is not None
        cached, sequence.cached = sequence.cached, None
        if sequence.max_tokens == 0:
            return self._delta(sequence, (), cached, self._prompt_logprobs(sequence), "length", None)
        token = self._token(sequence, position)
        sequence.tokens.append(token)
        self._generated += 1
        self._prompt_tokens += sequence.prompt_len if first else 0
        eos = token in self.card.eos_token_ids and not params.ignore_eos
        stopped = token in params.stop_token_ids or eos
        reason: FinishReason | None = None
        if stopped and sequence.generated > params.min_tokens:
            reason = "stop"
        elif sequence.generated >= sequence.max_tokens:
            reason = "length"
        scored = self._prompt_logprobs(sequence) if first else None
        return self._delta(sequence, (token,), cached, scored, reason, token if reason == "stop" else None)

    def _delta(
        self,
        sequence: FakeSequence,
        tokens: tuple[int, ...],
        cached: int | None,
        scored: tuple[TokenLogprobs, ...] | None,
        reason: FinishReason | None,
        stop_token: int | None,
    ) -> TokenDelta:
        if reason is not None:
            self._end(sequence, reason)
        top = sequence.submit.params.logprobs
        return TokenDelta(
            request_id=sequence.submit.request_id,
            attempt=sequence.submit.attempt,
            index=sequence.index,
            tokens=tokens,
            logprobs=None if top is None else tuple(self._logprobs(token, top) for token in tokens),
            prompt_logprobs=scored,
            cached_tokens=cached,
            queued_s=None if cached is None else sequence.queued_s,
            finish_reason=reason,
            stop_token=stop_token,
        )

    def _token(self, sequence: FakeSequence, position: int) -> int:
        """The echo; after one round of it the model's end token, where that may come."""
        params, ends = sequence.submit.params, self.card.eos_token_ids
        if position >= max(len(sequence.echo), params.min_tokens) and ends and not params.ignore_eos:
            return ends[0]
        if params.stop_token_ids and position >= max(len(sequence.echo), params.min_tokens):
            return params.stop_token_ids[0]
        return sequence.echo[(sequence.start + position) % len(sequence.echo)]

    def _prompt_logprobs(self, sequence: FakeSequence) -> tuple[TokenLogprobs, ...] | None:
        top = sequence.submit.params.prompt_logprobs
        if top is None or sequence.index:
            return None
        return tuple(self._logprobs(token, top) for token in sequence.tokens[1 : sequence.prompt_len])

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        best = tuple((token + i) % self.card.vocab_size for i in range(min(top, self.card.vocab_size)))
        return TokenLogprobs(token, -0.25, 1, best, tuple(-0.25 - i for i in range(len(best))))

    def _end(self, sequence: FakeSequence, reason: FinishReason) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._finished[reason] += 1

    def _pass_time(self, began: float, prefilled: int, sequences: int) -> None:
        predicted = self._step_time().seconds(prefilled, 0, sequences)
        time.sleep(max(0.0, predicted - (time.monotonic() - began)))

    def _step_time(self) -> StepTime:
        return StepTime(
            base=self._fake.step_base_s,
            prefill_token=self._fake.prefill_token_s,
            kv_token=0.0,
            sequence=self._fake.sequence_s,
        )

    def _note_stats(self) -> None:
        """A new immutable snapshot, for other threads."""
        behind = sum(sequence.trailing for sequence in (*self._waiting, *self._running))
        self._stats = WorkerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_prefill_tokens=behind,
            running_kv_tokens=sum(sequence.computed for sequence in self._running),
            total_blocks=self.total_blocks,
            free_blocks=self._pool.free,
            cached_blocks=self._pool.cached,
            max_running=self._batch.max_num_seqs,
            max_step_tokens=self._batch.max_num_batched_tokens,
            steps=self._steps,
            step_time=self._step_time(),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            prefix_query_tokens=self._queried,
            prefix_hit_tokens=self._hits,
            preemptions=self._preemptions,
            evicted_blocks=self._pool.evicted,
            finished=dict(self._finished),
        )


def _card(config: EngineConfig, total_blocks: int) -> ModelCard:
    info, cache = read_config(config.model.folder), config.cache
    limit = config.model.max_model_len or info.max_position_embeddings
    return ModelCard(
        name=config.model.served_name,
        folder=str(config.model.folder),
        # one sequence always fits, so that the oldest can go on to its end
        max_model_len=min(limit, total_blocks * cache.block_size),
        vocab_size=info.vocab_size,
        block_size=cache.block_size,
        hash_root=hash_root(
            fingerprint=f"fake:{config.model.served_name}",
            quantization="none",
            block_size=cache.block_size,
            kv_dtype="none",
        ),
        kv_bytes_per_token=2 * 2 * info.layers * info.kv_heads * info.head_dim,
        eos_token_ids=info.eos_token_ids,
    )


def _digest(values: list[int]) -> int:
    packed = b"".join(value.to_bytes(9, "little", signed=True) for value in values)
    return int.from_bytes(blake2b(packed, digest_size=4).digest(), "little")

"""What happened to one generation and when: its metrics are counted here, its log line and spans made of it.

The router's `Generation` tells it each event, and asks it for what usage and deadlines need. Times are
monotonic seconds of this process; of the worker only durations are known, so that no two clocks are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from decodefleet.worker.protocol import Placement, TokenDelta

from .router_metrics import (
    DECODE,
    E2E,
    GENERATED_TOKENS,
    INFERENCE,
    ITL,
    PREFILL,
    PROMPT_TOKENS,
    QUEUE,
    RESUME,
    TPOT,
    TTFT,
    RouterMetrics,
)

Clock = Callable[[], float]


@dataclass(slots=True)
class Attempt:
    """One worker's try. asked: when a placement was asked for. error: why it ended, None where it did not."""

    asked: float
    placed: float | None = None
    placement: Placement | None = None
    queued_s: float | None = None
    first_token: float | None = None
    ended: float | None = None
    error: str | None = None
    tokens: int = 0


class Timeline:
    """`placing` and `placed` for each attempt, `received` for each delta, `closed` once.

    cached_tokens: known with the first token. finish_reasons: of sequences that ended by themselves.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        prompt_tokens: int,
        metrics: RouterMetrics,
        *,
        tenant: str = "",
        authenticated: bool = False,
        n: int = 1,
        clock: Clock = time.monotonic,
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.tenant = tenant
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.longest_gap_s = 0.0
        self.finish_reasons: list[str] = []
        self.attempts: list[Attempt] = []
        self.began = clock()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.ended: float | None = None
        self._clock = clock
        self._metrics = metrics
        self._gaps = metrics.distribution(ITL, model)
        self._received = metrics.generated(model)
        self._last: list[float | None] = [None] * n
        self._lost_at: float | None = None
        # /metrics is read without a key: no name stands there that a caller gave itself
        self._label = metrics.tenants.label(tenant if authenticated else "")
        metrics.started(self._label)

    @property
    def complete(self) -> bool:
        """Whether all sequences ended by themselves."""
        return len(self.finish_reasons) == len(self._last)

    @property
    def worker_id(self) -> str | None:
        """Of the last worker that it was placed on."""
        placements = [attempt.placement for attempt in self.attempts if attempt.placement is not None]
        return placements[-1].worker_id if placements else None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.began

    @property
    def decode_s(self) -> float | None:
        """From first to last token."""
        if self.first_token is None or self.last_token is None:
            return None
        return self.last_token - self.first_token

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens of a sequence, whose number the request has alike."""
        later = self.generated_tokens - len(self._last)
        return None if self.decode_s is None or later <= 0 else self.decode_s * len(self._last) / later

    @property
    def queue_s(self) -> float | None:
        """Time waited for a placement and in workers; None before the first token."""
        if self.first_token is None:
            return None
        placing = sum((attempt.placed or attempt.asked) - attempt.asked for attempt in self.attempts)
        return placing + sum(attempt.queued_s or 0.0 for attempt in self.attempts)

    def placing(self) -> None:
        self.attempts.append(Attempt(self._clock()))

    def placed(self, placement: Placement) -> None:
        attempt = self.attempts[-1]
        attempt.placed, attempt.placement = self._clock(), placement
        if len(self.attempts) == 1:
            self._metrics.prompt_tokens.labels(self.model).inc(self.prompt_tokens)

    def received(self, delta: TokenDelta) -> None:
        now, attempt = self._clock(), self.attempts[-1]
        if attempt.first_token is None:
            attempt.first_token, attempt.queued_s = now, delta.queued_s
        if self.first_token is None:
            self._first(now, delta)
        elif self._lost_at is not None:
            self._metrics.distribution(RESUME, self.model).observe(now - self._lost_at)
        self._lost_at = None
        last = self._last[delta.index]
        if last is not None:
            self._gaps.observe(now - last)
            self.longest_gap_s = max(self.longest_gap_s, now - last)
        self._last[delta.index] = self.last_token = now
        count = len(delta.tokens)
        attempt.tokens += count
        self.generated_tokens += count
        self._received.count += count

    def finished(self, reason: str) -> None:
        """One of the sequences ended by itself."""
        self.finish_reasons.append(reason)

    def moved(self, error: Exception) -> None:
        """The attempt failed, and another worker is asked."""
        self._end_attempt(str(error))
        self._metrics.retries.inc()
        if self.first_token is None:
            return
        self._metrics.migrations.inc()
        if self._lost_at is None:
            self._lost_at = self._clock()

    def failed(self, error: Exception, reason: str) -> None:
        """The request ends with an error. reason: its code, one of few."""
        self._end_attempt(str(error))
        self._metrics.failed(reason)

    def closed(self) -> None:
        self.ended = self._clock()
        self._end_attempt(None)
        self._metrics.in_flight.dec()
        self._count_tenant()
        if self.first_token is not None:
            self._measure_whole(self.ended)

    def _first(self, now: float, delta: TokenDelta) -> None:
        self.first_token = now
        self.cached_tokens = delta.cached_tokens or 0
        self._metrics.cached_tokens.labels(self.model).inc(self.cached_tokens)
        self._metrics.distribution(TTFT, self.model).observe(now - self.began)

    def _end_attempt(self, error: str | None) -> None:
        if self.attempts and self.attempts[-1].ended is None:
            self.attempts[-1].ended, self.attempts[-1].error = self._clock(), error

    def _count_tenant(self) -> None:
        tokens, tenant = self._metrics.tenant_tokens, self._label
        if self.first_token is not None:
            tokens.labels(tenant, "prompt").inc(self.prompt_tokens)
        tokens.labels(tenant, "generated").inc(self.generated_tokens)

    def _measure_whole(self, ended: float) -> None:
        ttft_s, queue_s, decode_s = self.ttft_s or 0.0, self.queue_s or 0.0, self.decode_s or 0.0
        measured = {
            E2E: ended - self.began,
            QUEUE: queue_s,
            PREFILL: max(0.0, ttft_s - queue_s),
            DECODE: decode_s,
            INFERENCE: max(0.0, ttft_s - queue_s) + decode_s,
            TPOT: self.tpot_s,
            PROMPT_TOKENS: self.prompt_tokens,
            GENERATED_TOKENS: self.generated_tokens,
        }
        for measure, value in measured.items():
            if value is not None:
                self._metrics.distribution(measure, self.model).observe(value)

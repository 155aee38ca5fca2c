"""Reads off the scheduler's core what the autoscaler wants to know. Changes nothing there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from decodefleet.worker.protocol import StepTime

from ..scheduling.cost import bounded
from ..scheduling.decisions import Decision
from ..scheduling.fleet import Member
from ..scheduling.scheduler import GlobalScheduler
from .autoscaler import Autoscaler
from .autoscaler import Decision as Scaling
from .demand import Asked
from .replay import WorkerModel


class Observed(NamedTuple):
    """Of one model. workers: that serve. open_requests: waiting or running. waiting: that have not started.
    backlog_s: prefill still to do, in seconds of one worker. model: of a worker; None without workers."""

    workers: int
    open_requests: int
    waiting: int
    backlog_s: float
    model: WorkerModel | None


def observe(core: GlobalScheduler, model: str, step_target_s: float, now: float) -> Observed:
    serving = core.fleet.serving(model, now)
    line = [waiter for waiter in core.queue if waiter.place.model == model]
    loads = [core.ledger.load(member.key) for member in serving]
    worker = _worker_model(serving, step_target_s)
    prefill = sum(load.prefill_tokens for load in loads) + sum(one.demand.prompt_tokens for one in line)
    return Observed(
        workers=len(serving),
        open_requests=len(line) + sum(core.ledger.count(member.key) for member in serving),
        waiting=len(line) + sum(member.stats.waiting for member in serving),
        backlog_s=0.0 if worker is None else prefill * worker.step.prefill_token,
        model=worker,
    )


class Watch:
    """Feeds an autoscaler from a scheduler: every few seconds `look`, then `decide`."""

    def __init__(
        self, core: GlobalScheduler, autoscaler: Autoscaler, model: str, step_target_s: float
    ) -> None:
        self.autoscaler = autoscaler
        self._core, self._model, self._step_target_s = core, model, step_target_s
        self._seen = core.log.added

    def look(self, now: float) -> Observed:
        """The scheduler as it is now; takes in what was placed since the last look."""
        for decision in self._core.log.since(self._seen):
            if decision.model == self._model and decision.chosen is not None and not decision.attempt:
                self.autoscaler.asked(_asked(decision))
        self._seen = self._core.log.added
        return observe(self._core, self._model, self._step_target_s, now)

    def decide(self, target: int, seen: Observed, now: float) -> Scaling:
        """target: workers that were asked for before. Reads nothing of the scheduler: fit for a thread."""
        return self.autoscaler.decide(
            now,
            target=target,
            workers=seen.workers,
            open_requests=seen.open_requests,
            backlog_s=seen.backlog_s,
            model=seen.model,
        )


def _asked(decision: Decision) -> Asked:
    demand = decision.demand
    chosen = next(view for view in decision.considered if view.key == decision.chosen)
    cached = chosen.cached_tokens(demand, decision.hit(chosen))
    return Asked(
        at=decision.at - decision.waited_s,
        prefill_tokens=demand.prompt_tokens - cached,
        context=demand.prompt_tokens + demand.n * demand.expected_tokens // 2,
        output_tokens=demand.expected_tokens,
    )


def _worker_model(members: Sequence[Member], step_target_s: float) -> WorkerModel | None:
    """The mean of those that serve."""
    if not members:
        return None
    steps = [bounded(member.stats.step_time) for member in members]
    limits = [member.stats.max_running for member in members if member.stats.max_running is not None]
    return WorkerModel(
        step=StepTime(
            base=_mean([step.base for step in steps]),
            prefill_token=_mean([step.prefill_token for step in steps]),
            kv_token=_mean([step.kv_token for step in steps]),
            sequence=_mean([step.sequence for step in steps]),
        ),
        kv_tokens=max(1, min(member.stats.total_blocks * member.card.block_size for member in members)),
        step_target_s=step_target_s,
        max_running=min(limits) if limits else None,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

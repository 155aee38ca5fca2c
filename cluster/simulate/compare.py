"""Runs what was asked for, one simulation per policy on the same arrivals. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from decodefleet.worker.config import BatchConfig

from ..bench.traces import MOONCAKE_BLOCK, TraceError, read_trace
from .arrivals import Arrival, arrivals
from .fleet import Blueprint, Delays
from .machine import Machine, MachineError, derive, gpu, model_shape, read_step_cost
from .options import SimulateError, SimulateOptions
from .oracle import pooled_hit_rate
from .outcome import Objectives, Summary, balance, hit_rate, milliseconds
from .policies import UnknownPolicy, find_policy
from .simulation import Progress, Simulation

Observer = Callable[[str, int], Progress]
"""Called with a run's name and its number of requests; returns what counts those that have ended."""


class Comparison(NamedTuple):
    """Shares of prompt tokens that are found: oracle by one LRU over all workers' memory, endless by a cache
    without end."""

    runs: list[Summary]
    oracle: float
    endless: float
    requests: int


def compare(options: SimulateOptions, observe: Observer) -> Comparison:
    """Raises SimulateError."""
    try:
        blueprint = make_blueprint(options)
        requests = read_arrivals(options)
        named = [find_policy(name) for name in options.policy]
    except (MachineError, TraceError, UnknownPolicy) as error:
        raise SimulateError(str(error)) from error
    runs = []
    for policy in named:
        simulation = Simulation(
            requests,
            blueprint,
            policy,
            max_queue=options.max_queue,
            delays=delays(options),
            seed=options.seed,
            progress=observe(policy.policy.name, len(requests)),
        )
        for _ in range(options.workers):
            simulation.add_worker()
        simulation.run()
        runs.append(summarize(simulation, objectives(options), options.tensor_parallel_size))
    blocks = options.workers * (blueprint.max_len // options.block_size)
    return Comparison(
        runs,
        pooled_hit_rate(requests, options.block_size, blocks),
        pooled_hit_rate(requests, options.block_size, None),
        len(requests),
    )


def objectives(options: SimulateOptions) -> Objectives:
    return Objectives(options.ttft_target_ms / 1000, options.tpot_target_ms / 1000)


def delays(options: SimulateOptions) -> Delays:
    return Delays(options.heartbeat_ms / 1000, options.directory_ms / 1000)


def make_blueprint(options: SimulateOptions) -> Blueprint:
    """Raises MachineError, ModelError."""
    machine = derive(gpu(options.gpu), model_shape(options.model), options.tensor_parallel_size)
    step = machine.step if options.step_time is None else read_step_cost(options.step_time)
    tokens = options.kv_tokens or machine.kv_tokens
    batch = BatchConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        itl_target_ms=options.itl_target_ms,
    )
    if tokens < options.block_size:
        raise MachineError(f"--kv-tokens {tokens} is less than a block of {options.block_size}")
    return Blueprint(Machine(step, tokens, machine.kv_bytes), batch, options.block_size)


def read_arrivals(options: SimulateOptions) -> list[Arrival]:
    """Raises TraceError, SimulateError."""
    if MOONCAKE_BLOCK % options.block_size:
        raise SimulateError(f"--block-size {options.block_size} does not divide {MOONCAKE_BLOCK}")
    limit = None if options.requests is None else options.skip + options.requests
    requests = read_trace(options.trace, limit=limit)[options.skip :]
    if not requests:
        raise SimulateError(f"--skip {options.skip} leaves no request of {options.trace}")
    found = arrivals(
        requests, options.block_size, shared=options.trace.suffix != ".csv", copies=options.copies
    )
    start, span = found[0].at, found[-1].at - found[0].at
    speed = options.trace_speed
    if options.rate is not None and span:
        speed = options.rate * span / len(found)
    return [arrival._replace(at=(arrival.at - start) / speed) for arrival in found]


def summarize(simulation: Simulation, wanted: Objectives, gpus: int) -> Summary:
    """gpus: of one worker."""
    recorder, now = simulation.recorder, simulation.events.now
    served = recorder.served
    members = [*simulation.members.values(), *simulation.retired]
    present_s = sum((now if member.until is None else member.until) - member.since for member in members)
    return Summary(
        policy=simulation.policy,
        requests=len(simulation.arrivals),
        served=len(served),
        refused=dict(recorder.refused),
        duration_s=now,
        ttft=milliseconds(one.ttft for one in served),
        itl=recorder.gaps.quantiles(),
        tpot=milliseconds(one.tpot for one in served if one.tpot is not None),
        e2e=milliseconds(one.e2e for one in served),
        e2e_mean=1000 * sum(one.e2e for one in served) / max(1, len(served)),
        output_tokens_per_s=sum(one.output_tokens for one in served) / max(now, 1e-9),
        hit_rate=hit_rate(served),
        balance=balance([recorder.presence[member.key.worker_id] for member in members]),
        preemptions=sum(member.worker.preemptions for member in members),
        attained=sum(map(wanted.met, served)) / len(simulation.arrivals),
        gpu_s=gpus * (present_s + simulation.wasted_s),
        busy=sum(member.worker.busy_s for member in members) / max(present_s, 1e-9),
    )

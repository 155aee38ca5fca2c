"""Runs of fleets whose size follows the load: ours, other rules and a planner on the same arrivals.

What decides is `scaling`'s, what came of it `scaled_report`'s to tell. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..autoscaling.config import ScalingConfig
from ..autoscaling.replay import WorkerModel
from ..bench.traces import TraceError
from .arrivals import Arrival
from .compare import Observer, delays, make_blueprint, objectives, read_arrivals, summarize
from .fleet import Blueprint, Delays
from .machine import MachineError
from .options import SimulateError, SimulateOptions
from .outcome import Objectives, Summary
from .policies import Named, UnknownPolicy, find_policy
from .scaling import Fixed, Ours, Planner, Point, ScaledFleet, Scaler
from .simulation import IN_LIFE, Progress, Simulation


class Setup(NamedTuple):
    """What all runs on one load have in common. gpus: of one worker. seed: of the placements."""

    arrivals: Sequence[Arrival]
    blueprint: Blueprint
    policy: Named
    config: ScalingConfig
    gpus: int
    max_queue: int = 10**9
    delays: Delays = IN_LIFE
    seed: int = 0

    @property
    def step_target_s(self) -> float:
        return self.blueprint.batch.itl_target_ms / 1000

    def planner(self) -> Planner:
        """Knows the load and the machines as they are."""
        machine, batch = self.blueprint.machine, self.blueprint.batch
        model = WorkerModel(machine.step.linear, machine.kv_tokens, self.step_target_s, batch.max_num_seqs)
        return Planner(self.arrivals, model, self.config, self.config.startup_s)

    def ours(self, simulation: Simulation) -> Ours:
        return Ours(simulation, self.config, self.step_target_s)


class ScaledRun(NamedTuple):
    """timeline: every decision."""

    name: str
    summary: Summary
    timeline: list[Point]

    @property
    def turns(self) -> float:
        """Changes of direction in ten minutes."""
        moves = [b.target - a.target for a, b in pairwise(self.timeline) if a.target != b.target]
        turns = sum((a > 0) != (b > 0) for a, b in pairwise(moves))
        return turns / max(1.0, self.timeline[-1].at / 600)

    @property
    def most(self) -> int:
        return max(point.target for point in self.timeline)


def run_scaled(
    setup: Setup,
    name: str,
    make: Callable[[Simulation], Scaler],
    first: int,
    progress: Progress | None = None,
) -> ScaledRun:
    """first: workers that are there when it begins."""
    simulation = Simulation(
        setup.arrivals,
        setup.blueprint,
        setup.policy,
        max_queue=setup.max_queue,
        delays=setup.delays,
        seed=setup.seed,
        progress=progress,
    )
    fleet = ScaledFleet(
        simulation,
        make(simulation),
        first=first,
        startup_s=setup.config.startup_s,
        step_target_s=setup.step_target_s,
    )
    simulation.run()
    wanted = Objectives(setup.config.ttft_target_s, setup.config.itl_target_s)
    return ScaledRun(name, summarize(simulation, wanted, setup.gpus), fleet.timeline)


def compare_scaled(options: SimulateOptions, observe: Observer) -> tuple[Sequence[Arrival], list[ScaledRun]]:
    """The load, and on it: a planner that knows what comes, our autoscaler, and all the while as many workers
    as the planner has at most. Raises SimulateError."""
    setup = _setup(options)
    planner = setup.planner()
    most, count = max(planner.needs), len(setup.arrivals)

    def run(name: str, make: Callable[[Simulation], Scaler], first: int) -> ScaledRun:
        return run_scaled(setup, name, make, first, observe(name, count))

    return setup.arrivals, [
        run("planner", lambda _: planner, planner.first),
        run("autoscaler", setup.ours, planner.first),
        run(f"always {most}", lambda _: Fixed(most), most),
    ]


def _setup(options: SimulateOptions) -> Setup:
    if len(options.policy) > 1:
        raise SimulateError("--policy: only one with --max-workers")
    wanted = objectives(options)
    try:
        return Setup(
            read_arrivals(options),
            make_blueprint(options),
            find_policy(options.policy[0]),
            ScalingConfig(
                min_workers=options.min_workers,
                max_workers=options.max_workers or options.min_workers,
                ttft_target_s=wanted.ttft_s,
                itl_target_s=wanted.tpot_s,
                startup_s=options.startup_s,
                hold_s=options.scale_in_s,
                headroom=options.scale_headroom,
            ),
            options.tensor_parallel_size,
            options.max_queue,
            delays(options),
            options.seed,
        )
    except (MachineError, TraceError, UnknownPolicy) as error:
        raise SimulateError(str(error)) from error

"""How many workers a load takes, for loads made up here."""

import pytest

from decodefleet.cluster.autoscaling.policy import Snapshot, wanted_workers


def snapshot(make, **changes) -> Snapshot:
    fields = {
        "now": 180.0,
        "workers": 2,
        "open_requests": 5,
        "backlog_s": 0.0,
        "model": make.model,
    }
    return Snapshot(**fields | changes)


def steady(make, rate: float, seed: int = 0) -> list:
    return list(make.poisson(lambda at: rate, 180.0, seed))


@pytest.mark.parametrize("workers", [1, 3, 20])
def test_enough_does_not_depend_on_what_is_there(make, workers):
    """6 requests a second of 0.51 s each are three workers' full time."""
    found = wanted_workers(snapshot(make, workers=workers), steady(make, 6.0), make.config())
    assert found.workers in (4, 5)
    assert found.reason == "objectives"
    assert found.forecast.attained >= 0.99


def test_load_grows_the_fleet(make):
    found = [
        wanted_workers(snapshot(make), steady(make, rate), make.config()).workers
        for rate in (0.3, 3.0, 9.0, 20.0)
    ]
    assert found == sorted(set(found))


def test_tighter_objectives_take_more(make):
    asked = steady(make, 6.0)
    loose = wanted_workers(snapshot(make), asked, make.config(ttft_target_s=10.0)).workers
    tight = wanted_workers(snapshot(make), asked, make.config(ttft_target_s=1.0)).workers
    by_itl = wanted_workers(snapshot(make), asked, make.config(itl_target_s=0.025)).workers
    assert loose < tight
    assert loose < by_itl


def test_memory_takes_workers_too(make):
    asked = [one._replace(context=60_000, output_tokens=2000) for one in steady(make, 1.0)]
    found = wanted_workers(snapshot(make), asked, make.config(itl_target_s=1.0, ttft_target_s=30.0))
    # about 20 at once, three of which fit a worker
    assert found.workers >= 7


def test_growth_is_met_before_it_comes(make):
    asked = steady(make, 6.0)
    now, soon = (wanted_workers(snapshot(make, growth=growth), asked, make.config()) for growth in (1.0, 1.5))
    # what is to be spare in any case comes on top
    assert soon.growth == pytest.approx(1.5 * now.growth)
    assert soon.workers > now.workers


def test_prompts_too_long_for_the_objective_take_no_workers(make):
    asked = [
        one._replace(prefill_tokens=100 if number % 20 else 50_000)
        for number, one in enumerate(steady(make, 1.0))
    ]
    assert wanted_workers(snapshot(make), asked, make.config()).workers < 10


def test_prompts_that_only_an_empty_fleet_could_keep_take_none_either(make):
    """2.4 s of prefill are kept alone; beside one decode a third is added, beside more so much more."""
    model = make.model._replace(step_target_s=0.05)
    asked = [
        one._replace(prefill_tokens=4800 if number % 20 == 0 else 100, output_tokens=200)
        for number, one in enumerate(steady(make, 6.0))
    ]
    config = make.config(ttft_target_s=2.6)
    assert wanted_workers(snapshot(make, model=model), asked, config).workers < 10
    # a goal that no number of workers reaches
    strict = make.config(ttft_target_s=3.2, attainment=0.9999)
    assert wanted_workers(snapshot(make, model=model), asked, strict).workers < 12


def test_backlog_is_worked_off(make):
    asked = steady(make, 2.0)
    calm = wanted_workers(snapshot(make), asked, make.config())
    late = wanted_workers(snapshot(make, backlog_s=130.0), asked, make.config())
    assert late.reason == "backlog"
    # 120 s of work beyond the objective, in 30 s
    assert late.workers == calm.workers + 4


def test_bounds(make):
    assert wanted_workers(snapshot(make), steady(make, 20.0), make.config(max_workers=3)).workers == 3
    assert wanted_workers(snapshot(make), steady(make, 0.1), make.config(min_workers=2)).workers == 2


def test_idle_fleets_keep_one_worker_for_a_while(make):
    config = make.config(min_workers=0, idle_s=600.0)

    def left(quiet_s: float, workers: int) -> int:
        quiet = snapshot(make, open_requests=0, quiet_s=quiet_s, workers=workers)
        return wanted_workers(quiet, [], config).workers

    assert left(590.0, workers=5) == 1
    assert left(600.0, workers=5) == 0
    assert left(0.0, workers=0) == 0


def test_first_request_wakes_an_empty_fleet(make):
    config = make.config(min_workers=0)
    assert wanted_workers(snapshot(make, workers=0, model=None), [], config).workers == 1
    asleep = wanted_workers(snapshot(make, workers=0, model=None, open_requests=0), [], config)
    assert (asleep.workers, asleep.reason) == (0, "idle")


def test_workers_that_said_nothing_yet_are_kept(make):
    found = wanted_workers(snapshot(make, workers=3, model=None), steady(make, 9.0), make.config())
    assert (found.workers, found.reason) == (3, "unknown")

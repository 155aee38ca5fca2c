"""The coarse model of workers: examples worked out by hand."""

import pytest

from decodefleet.cluster.autoscaling.replay import WorkerModel, attainable, replay


def test_prefills_of_one_worker_come_one_after_the_other(make):
    """0.51 s each, so that the third of three starts after 1.02 s."""
    asked = [make.asked(0.0) for _ in range(3)]
    assert replay(asked, 1, make.model, 1.54, 1.0).attained == 1.0
    found = replay(asked, 1, make.model, 1.52, 1.0)
    assert found.attained == pytest.approx(2 / 3)
    assert found.wait_s == pytest.approx((0 + 0.51 + 1.02) / 3)
    assert replay(asked, 3, make.model, 0.52, 1.0).attained == 1.0


def test_decodes_share_a_step(make):
    """Ten that came before make a step of 0.0111 s and what reading takes; prefill has almost no share."""
    asked = [make.asked(float(at), prefill=1, output=10_000) for at in range(11)]
    assert replay(asked, 1, make.model, 9.0, 0.0115, judged_from=10.0).attained == 1.0
    assert replay(asked, 1, make.model, 9.0, 0.0110, judged_from=10.0).attained == 0.0


def test_prefill_beside_decodes_takes_longer(make):
    """Beside one decode of 0.0101 s a prefill has 0.0199 of 0.03 s, so that 0.51 s take 0.769."""
    model = make.model._replace(step_target_s=0.03)
    asked = [make.asked(0.0, output=1000), make.asked(1.0)]
    assert replay(asked, 1, model, 0.78, 1.0, judged_from=1.0).attained == 1.0
    assert replay(asked, 1, model, 0.76, 1.0, judged_from=1.0).attained == 0.0


def test_full_memory_holds_up_what_comes(make):
    small = WorkerModel(make.step, kv_tokens=1500, step_target_s=0.0)
    asked = [make.asked(0.0, output=100), make.asked(1.0)]
    free = replay(asked, 1, make.model, 1.0, 1.0)
    held = replay(asked, 1, small, 1.0, 1.0)
    assert free.wait_s == 0.0
    # the first decodes for a second after its 0.51 s of prefill; prefill takes 1 s of the least time, 15 s
    assert held.wait_s == pytest.approx((0.51 + 1.01 / (1 - 1 / 15) - 1.0) / 2, rel=0.05)
    assert held.kv_peak == pytest.approx(1000 / 1500)


def test_faster_means_closer_together(make):
    asked = [make.asked(float(at)) for at in range(100)]
    assert replay(asked, 1, make.model, 0.6, 1.0).attained == 1.0
    assert replay(asked, 1, make.model, 0.6, 1.0, faster=2.0).attained < 0.5


def test_more_workers_never_keep_less(make):
    asked = list(make.poisson(lambda at: 6.0, 60.0))
    attained = [replay(asked, workers, make.model, 1.2, 0.2).attained for workers in range(8)]
    assert attained[0] == 0.0
    assert attained == sorted(attained)
    assert attained[-1] > 0.99


def test_what_no_fleet_can_keep(make):
    asked = [make.asked(prefill=1000), make.asked(prefill=50_000), make.asked(context=10**9)]
    assert attainable(asked, make.model, 2.0, 0.1) == pytest.approx(1 / 3)
    assert replay(asked, 3, make.model, 2.0, 0.1).attained <= 1 / 3 + 1e-9


def test_what_is_kept_alone_may_not_be_beside_another(make):
    """Steps of 0.0101 s in 0.03 s leave 66 % for prefill: 0.51 s take 0.769."""
    model = make.model._replace(step_target_s=0.03)
    asked = [make.asked(prefill=1000)]
    assert attainable(asked, make.model, 0.52, 1.0) == 1.0
    assert attainable(asked, model, 0.76, 1.0) == 0.0
    assert attainable(asked, model, 0.78, 1.0) == 1.0

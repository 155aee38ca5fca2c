"""The worker's model of its own steps: learns from them, and stays sane where they tell it nothing."""

from __future__ import annotations

import random

import pytest

from decodefleet.worker.protocol import StepTime
from decodefleet.worker.step_time import LEAST_PREFILL, StepTimeModel

PRIOR = StepTime(base=0.010, prefill_token=0.001, kv_token=2e-6, sequence=0.001)
TRUTH = StepTime(base=0.020, prefill_token=0.0005, kv_token=2e-6, sequence=0.002)


def test_it_learns_what_steps_take() -> None:
    model, rng = StepTimeModel(PRIOR), random.Random(0)
    for _ in range(400):
        step = (rng.randrange(512), rng.randrange(20_000), rng.randrange(32))
        model.observe(TRUTH.seconds(*step), *step)
    fitted = model.fitted()
    for step in ((0, 0, 1), (256, 300, 0), (64, 10_000, 16)):
        assert fitted.seconds(*step) == pytest.approx(TRUTH.seconds(*step), rel=0.15)


def test_it_is_the_prior_before_the_first_step() -> None:
    fitted = StepTimeModel(PRIOR).fitted()
    assert fitted.seconds(100, 1000, 4) == pytest.approx(PRIOR.seconds(100, 1000, 4))


def test_no_coefficient_is_negative_and_prefill_is_never_free() -> None:
    model = StepTimeModel(PRIOR)
    # longer steps that take less: no sane coefficients explain them
    for tokens in range(1, 400):
        model.observe(0.5 / tokens, tokens, 10 * tokens, tokens % 8)
    fitted = model.fitted()
    assert min(fitted.base, fitted.kv_token, fitted.sequence) >= 0
    assert fitted.prefill_token >= LEAST_PREFILL * PRIOR.prefill_token * (1 - 1e-9)

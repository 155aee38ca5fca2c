"""The worker's model of its own steps: learns from them, and stays sane where they tell it nothing."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from decodefleet.worker.protocol import StepTime
from decodefleet.worker.step_time import LEAST_PREFILL, StepTimeModel, _nonnegative

PRIOR = StepTime(base=0.010, prefill_token=0.001, kv_token=2e-6, sequence=0.001)
TRUTH = StepTime(base=0.020, prefill_token=0.0005, kv_token=2e-6, sequence=0.002)


def scaled(times: StepTime, *factors: float) -> StepTime:
    base, prefill, kv, sequence = factors
    return StepTime(
        base=times.base * base,
        prefill_token=times.prefill_token * prefill,
        kv_token=times.kv_token * kv,
        sequence=times.sequence * sequence,
    )


def mixed_step(rng: random.Random, prefill: int = 512) -> tuple[int, int, int]:
    """What a loaded worker's steps look like: some prefill, and decodes each with a context of its own."""
    sequences = rng.randrange(1, 32)
    context = sum(rng.randrange(100, 4000) for _ in range(sequences))
    return (rng.choice([0, rng.randrange(prefill)]), context, sequences)


def fit(
    truth: StepTime,
    prior: StepTime,
    *,
    steps: int = 400,
    noise: float = 0.0,
    seed: int = 0,
    sample=mixed_step,
) -> StepTime:
    model, rng = StepTimeModel(prior), random.Random(seed)
    for _ in range(steps):
        step = sample(rng)
        model.observe(truth.seconds(*step) * (1 + rng.gauss(0, noise)), *step)
    return model.fitted()


@pytest.mark.parametrize("name", ["base", "prefill_token", "kv_token", "sequence"])
@pytest.mark.parametrize("factor", [1e-3, 1e-1, 1.0, 1e1, 1e3])
def test_it_learns_each_coefficient_however_wrong_the_prior(name, factor):
    if name == "prefill_token":
        # never less than a tenth of the prior
        factor = min(factor, 1 / LEAST_PREFILL)
    factors = [factor if name == each else 1.0 for each in StepTime.__struct_fields__]
    fitted = fit(TRUTH, scaled(TRUTH, *factors))
    assert getattr(fitted, name) == pytest.approx(getattr(TRUTH, name), rel=0.1)


@pytest.mark.parametrize("speed", [1e-3, 1e-1, 1e1])
def test_it_learns_machines_of_any_speed(speed):
    truth = scaled(TRUTH, *[speed] * 4)
    fitted = fit(truth, scaled(PRIOR, *[speed] * 4))
    for step in ((0, 2000, 1), (256, 3000, 1), (64, 10_000, 16), (0, 60_000, 30)):
        assert fitted.seconds(*step) == pytest.approx(truth.seconds(*step), rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_averaged_out(seed):
    """Steps that vary by a tenth, and a prior that is wrong by ten."""
    fitted = fit(TRUTH, scaled(TRUTH, 0.1, 10.0, 0.1, 10.0), noise=0.1, seed=seed)
    for step in ((0, 2000, 1), (256, 3000, 1), (64, 30_000, 16), (0, 60_000, 30)):
        assert fitted.seconds(*step) == pytest.approx(TRUTH.seconds(*step), rel=0.15)
    assert fitted.kv_token == pytest.approx(TRUTH.kv_token, rel=0.3)
    assert fitted.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.3)


def test_what_moves_together_is_told_apart_by_the_prior():
    """All contexts equal: kv_token and sequence cannot be told apart, and their sum can."""
    context = 1000
    truth = StepTime(base=0.01, prefill_token=1e-3, kv_token=1e-6, sequence=1e-3)

    def together(rng: random.Random) -> tuple[int, int, int]:
        sequences = rng.randrange(1, 32)
        return (rng.choice([0, 100]), context * sequences, sequences)

    fitted = fit(truth, scaled(truth, 1.0, 1.0, 1.0, 1.0), sample=together)
    assert fitted.kv_token == pytest.approx(truth.kv_token, rel=0.05)
    # from a prior that is wrong about both, each keeps its part of what the data say of the sum
    fitted = fit(truth, scaled(truth, 1.0, 1.0, 3.0, 3.0), sample=together)
    assert context * fitted.kv_token + fitted.sequence == pytest.approx(2e-3, rel=0.05)
    assert context * fitted.kv_token == pytest.approx(fitted.sequence, rel=0.2)


def test_it_follows_a_machine_that_changes():
    model, rng = StepTimeModel(PRIOR), random.Random(0)
    for factor in (1.0, 3.0):
        for _ in range(1500):
            step = mixed_step(rng)
            model.observe(factor * TRUTH.seconds(*step), *step)
        fitted = model.fitted()
        assert fitted.seconds(64, 10_000, 16) == pytest.approx(
            factor * TRUTH.seconds(64, 10_000, 16), rel=0.1
        )


def test_it_is_the_prior_before_the_first_step() -> None:
    fitted = StepTimeModel(PRIOR).fitted()
    for name in StepTime.__struct_fields__:
        assert getattr(fitted, name) == pytest.approx(getattr(PRIOR, name))


def test_what_was_never_seen_stays_the_prior():
    """A worker that has only decoded says nothing of prefill."""
    fitted = fit(TRUTH, PRIOR, sample=lambda rng: mixed_step(rng, prefill=1))
    assert fitted.prefill_token == pytest.approx(PRIOR.prefill_token)


def test_no_coefficient_is_negative_and_prefill_is_never_free() -> None:
    model = StepTimeModel(PRIOR)
    # longer steps that take less: no sane coefficients explain them
    for tokens in range(1, 400):
        model.observe(0.5 / tokens, tokens, 10 * tokens, tokens % 8)
    fitted = model.fitted()
    assert min(fitted.base, fitted.kv_token, fitted.sequence) >= 0
    assert fitted.prefill_token >= LEAST_PREFILL * PRIOR.prefill_token * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_nonnegative_least_squares(seed):
    """Against a search over a fine grid around it: no feasible neighbour is better."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(6, 4))
    gram, moment = root.T @ root + 1e-3 * np.eye(4), rng.normal(size=4)

    def loss(theta):
        return 0.5 * theta @ gram @ theta - moment @ theta

    found = _nonnegative(gram, moment)
    assert (found >= 0).all()
    for delta in itertools.product((-1e-3, 0.0, 1e-3), repeat=4):
        assert loss(found) <= loss(np.maximum(found + delta, 0)) + 1e-12

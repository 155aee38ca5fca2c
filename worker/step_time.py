"""Predicts how long a step takes, from the steps that were: the worker's one calibrated model of itself.

t = base + prefill·tokens + kv·tokens_read + sequence·decodes, least squares with forgetting. The features
move together, so a prior holds each coefficient until the data say otherwise, and none may be negative.
Torch-free; knows nothing of what a step does.
"""

from __future__ import annotations

import numpy as np

from .protocol import StepTime

FORGETTING = 0.995
# a typical value of each feature, which makes the coefficients comparable
SCALE = np.array([1.0, 256.0, 4096.0, 8.0])
PRIOR_WEIGHT = 0.05
# of the prior's: where features moved together, the fit may give a prefill token next to nothing
LEAST_PREFILL = 0.3


class StepTimeModel:
    def __init__(self, prior: StepTime) -> None:
        self._prior = np.array([prior.base, prior.prefill_token, prior.kv_token, prior.sequence]) * SCALE
        self._gram = np.zeros((4, 4))
        self._moment = np.zeros(4)
        self._unread: list[tuple[float, int, int, int]] = []

    def observe(self, seconds: float, prefill_tokens: int, kv_tokens: int, sequences: int) -> None:
        """One finished step. Costs next to nothing, for it comes after each."""
        self._unread.append((seconds, prefill_tokens, kv_tokens, sequences))

    def fitted(self) -> StepTime:
        """The coefficients as of now."""
        for seconds, *features in self._unread:
            self._take(seconds, features)
        self._unread.clear()
        base, prefill, kv, sequence = (float(c) for c in self._solve() / SCALE)
        least = LEAST_PREFILL * float(self._prior[1] / SCALE[1])
        return StepTime(base=base, prefill_token=max(prefill, least), kv_token=kv, sequence=sequence)

    def _take(self, seconds: float, features: list[int]) -> None:
        x = np.array([1.0, *features]) / SCALE
        # long steps carry no more weight than short ones: residuals are relative
        weight = 1.0 / max(seconds, 1e-4) ** 2
        self._gram = FORGETTING * self._gram + weight * np.outer(x, x)
        self._moment = FORGETTING * self._moment + weight * seconds * x

    def _solve(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Ridge towards the prior; negative coefficients are pinned to zero one after the other."""
        ridge = np.diag(PRIOR_WEIGHT / np.maximum(self._prior, 1e-6) ** 2)
        gram, moment = self._gram + ridge, self._moment + ridge @ self._prior
        free = np.ones(4, dtype=bool)
        while True:
            theta = np.zeros(4)
            theta[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            if (theta >= 0).all():
                return theta
            free[int(theta.argmin())] = False

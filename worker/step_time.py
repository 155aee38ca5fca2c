"""Predicts how long a step takes, from the steps that were: the worker's one calibrated model of itself.

t = base + prefill·tokens + kv·tokens_read + sequence·decodes, least squares with forgetting, residuals
relative to the step's length. The features move together, so a prior settles what the data leave open, and
only that: its strength is a fraction of what has been seen of each feature, whatever the feature's unit or
the prior's size, and no coefficient is believed to explain more time than there was. None is negative.
Torch-free; knows nothing of what a step does.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from .protocol import StepTime

# about the last 200 steps count
FORGETTING = 0.995
# of what has been seen of a feature. Less lets noise of a tenth split what moves together; ten times as much
# leaves a twentieth of a prior that is wrong by a thousand
PRIOR_WEIGHT = 3e-4
# of the prior's: where features moved together, the fit may give a prefill token next to nothing
LEAST_PREFILL = 0.1
# a feature that never varied from zero keeps its prior by this weight alone
_UNSEEN = 1e-9

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


class StepTimeModel:
    def __init__(self, prior: StepTime) -> None:
        self._prior = np.array([prior.base, prior.prefill_token, prior.kv_token, prior.sequence])
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
        base, prefill, kv, sequence = (float(c) for c in self._solve())
        least = LEAST_PREFILL * float(self._prior[1])
        return StepTime(base=base, prefill_token=max(prefill, least), kv_token=kv, sequence=sequence)

    def _take(self, seconds: float, features: list[int]) -> None:
        # long steps carry no more weight than short ones: residuals are relative
        x = np.array([1.0, *features]) / max(seconds, 1e-6)
        self._gram = FORGETTING * self._gram + np.outer(x, x)
        self._moment = FORGETTING * self._moment + x

    def _solve(self) -> Vector:
        """Ridge towards the prior, in units in which each feature has been seen as much as the others."""
        seen = np.diag(self._gram)
        known = seen > 0
        scale = np.sqrt(np.where(known, seen, _UNSEEN / np.maximum(self._prior, 1e-12) ** 2))
        # alone it would explain all the time at this size; beside others it cannot be larger
        most = np.where(known, self._moment / np.where(known, seen, 1.0), np.inf)
        prior = np.minimum(self._prior, most) * scale
        gram = self._gram / np.outer(scale, scale) + PRIOR_WEIGHT * np.eye(4)
        return _nonnegative(gram, self._moment / scale + PRIOR_WEIGHT * prior) / scale


def _nonnegative(gram: np.ndarray[tuple[int, int], np.dtype[np.float64]], moment: Vector) -> Vector:
    """argmin ½ θᵀ·gram·θ - momentᵀ·θ over θ ≥ 0, by trying which coefficients are zero."""
    best, least = np.zeros(4), 0.0
    for count in range(4, 0, -1):
        for free in combinations(range(4), count):
            theta = np.zeros(4)
            theta[list(free)] = np.linalg.solve(gram[np.ix_(free, free)], moment[list(free)])
            if (theta < 0).any():
                continue
            if count == 4:
                return theta
            value = -0.5 * float(moment @ theta)
            if value < least:
                best, least = theta, value
    return best

"""How long answers are: a running mean per model, learned from finished requests. Pure bookkeeping."""

from __future__ import annotations

PRIOR_TOKENS = 128.0
# about the last hundred requests count
_GAIN = 1 / 64


class OutputLengths:
    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def observe(self, model: str, generated: int, n: int) -> None:
        """generated: tokens of all n sequences; nothing is learned from a request that never started."""
        if generated > 0:
            mean = self._mean.get(model, PRIOR_TOKENS)
            self._mean[model] = mean + (generated / n - mean) * _GAIN

    def expected(self, model: str, max_new_tokens: int, n: int) -> int:
        """Expected output tokens of one sequence; max_new_tokens bounds all n together."""
        most = max(1, max_new_tokens // n)
        return max(1, min(most, round(self._mean.get(model, PRIOR_TOKENS))))

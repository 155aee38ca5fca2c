"""A router's own counters, in a registry of their own; the scheduler sums those of all routers.

Names are an interface: dashboards and autoscalers read them, vLLM's aliases included.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_E2E_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class RouterMetrics:
    """Labels are bounded: endpoints are our own paths, statuses HTTP's, models those served."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "decodefleet_router_requests",
            "HTTP requests answered",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.retries = Counter(
            "decodefleet_router_retries",
            "requests sent to another worker before their first token",
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts placed")
        self.cached_tokens = self._counter("cached_tokens", "prompt tokens that the prefix cache supplied")
        self.generated_tokens = self._counter("generated_tokens", "tokens received from workers")
        self.in_flight = Gauge(
            "decodefleet_router_in_flight",
            "generations that are placed or wait for it",
            registry=self.registry,
        )
        self._ttft = self._histograms("time_to_first_token_seconds", "from admission to first token", _TTFT_S)
        self._itl = self._histograms("inter_token_latency_seconds", "between tokens of a sequence", _ITL_S)
        self._e2e = self._histograms("e2e_request_latency_seconds", "from admission to last token", _E2E_S)

    def first_token(self, model: str, seconds: float) -> None:
        for histogram in self._ttft:
            histogram.labels(model).observe(seconds)

    def next_token(self, model: str, seconds: float) -> None:
        for histogram in self._itl:
            histogram.labels(model).observe(seconds)

    def finished(self, model: str, seconds: float) -> None:
        for histogram in self._e2e:
            histogram.labels(model).observe(seconds)

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"decodefleet_router_{name}", text, ("model_name",), registry=self.registry)

    def _histograms(self, name: str, text: str, buckets: tuple[float, ...]) -> tuple[Histogram, ...]:
        """The same measure under our name and under vLLM's."""
        return tuple(
            Histogram(f"{prefix}{name}", text, ("model_name",), buckets=buckets, registry=self.registry)
            for prefix in ("decodefleet_router_", "vllm:")
        )

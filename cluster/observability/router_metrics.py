"""A router's own counters, in a registry of their own; the scheduler sums those of all routers.

Names are an interface: dashboards and autoscalers read them, vLLM's aliases included. What is observed for
every token is counted in plain lists and takes Prometheus' form only when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from decodefleet.worker.protocol import RouterCounts

from .distribution import Distribution
from .exposition import Exposition
from .tenant_labels import TenantLabels

# when a counter was made says nothing of a fleet's sum, and doubles the text
disable_created_metrics()  # type: ignore[no-untyped-call]

TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)
ITL_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_PHASE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_E2E_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_TOKENS = (
    1.0,
    4.0,
    16.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
    32768.0,
    131072.0,
)


class Measure(NamedTuple):
    """A histogram by model. alias: vLLM's name of the same thing, where it has one."""

    name: str
    documentation: str
    bounds: tuple[float, ...]
    alias: str | None = None


TTFT = Measure(
    "decodefleet_router_time_to_first_token_seconds",
    "Time from admission of a request to its first token.",
    TTFT_BOUNDS_S,
    "vllm:time_to_first_token_seconds",
)
ITL = Measure(
    "decodefleet_router_inter_token_latency_seconds",
    "Time between tokens of a sequence.",
    ITL_BOUNDS_S,
    "vllm:inter_token_latency_seconds",
)
TPOT = Measure(
    "decodefleet_router_time_per_output_token_seconds",
    "Mean time between the tokens of a request.",
    ITL_BOUNDS_S,
    "vllm:request_time_per_output_token_seconds",
)
E2E = Measure(
    "decodefleet_router_e2e_request_latency_seconds",
    "Time from admission of a request to its last token.",
    _E2E_S,
    "vllm:e2e_request_latency_seconds",
)
QUEUE = Measure(
    "decodefleet_router_queue_time_seconds",
    "Time that requests waited, in the scheduler and in a worker.",
    _PHASE_S,
    "vllm:request_queue_time_seconds",
)
PREFILL = Measure(
    "decodefleet_router_prefill_time_seconds",
    "Time from a worker's first step on a request to the first token.",
    _PHASE_S,
    "vllm:request_prefill_time_seconds",
)
DECODE = Measure(
    "decodefleet_router_decode_time_seconds",
    "Time from first to last token.",
    _E2E_S,
    "vllm:request_decode_time_seconds",
)
INFERENCE = Measure(
    "decodefleet_router_inference_time_seconds",
    "Time from a worker's first step on a request to the last token.",
    _E2E_S,
    "vllm:request_inference_time_seconds",
)
PROMPT_TOKENS = Measure(
    "decodefleet_router_request_prompt_tokens",
    "Prompt tokens of a request.",
    _TOKENS,
    "vllm:request_prompt_tokens",
)
GENERATED_TOKENS = Measure(
    "decodefleet_router_request_generated_tokens",
    "Tokens generated for a request, all its sequences together.",
    _TOKENS,
    "vllm:request_generation_tokens",
)
RESUME = Measure(
    "decodefleet_router_resume_seconds",
    "Time from the loss of a stream's worker to its next token.",
    TTFT_BOUNDS_S,
)
MEASURES = (
    TTFT,
    ITL,
    TPOT,
    E2E,
    QUEUE,
    PREFILL,
    DECODE,
    INFERENCE,
    PROMPT_TOKENS,
    GENERATED_TOKENS,
    RESUME,
)


class Tally:
    """What is counted for every token: Prometheus' counters take a lock each time."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class RouterMetrics:
    """Labels are bounded: endpoints are our paths, statuses HTTP's, models those served, tenants capped."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "HTTP requests answered.", "endpoint", "status")
        self.failures = self._counter("failures", "Generations that ended with an error.", "reason")
        self.retries = self._counter("retries", "Requests sent to another worker than their first.")
        self.stand_ins = self._counter(
            "stand_ins", "Requests placed by the last snapshot, for want of a scheduler."
        )
        self.migrations = self._counter("migrations", "Retries whose client already had a part of the text.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts placed.", "model_name")
        self.cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens that the prefix cache supplied.", "model_name"
        )
        self.tenant_requests = self._counter(
            "tenant_requests",
            "Generations by tenant; those beyond a number of tenants as other.",
            "tenant",
        )
        self.tenant_tokens = self._counter(
            "tenant_tokens", "Tokens by tenant and kind, prompt or generated.", "tenant", "kind"
        )
        self.in_flight = Gauge(
            "decodefleet_router_in_flight",
            "Generations that are placed or wait for it.",
            registry=self._registry,
        )
        self.tenants = TenantLabels()
        self._distributions: dict[Measure, dict[str, Distribution]] = {measure: {} for measure in MEASURES}
        self._generated: dict[str, Tally] = {}
        self._started = self._failed = 0

    def distribution(self, measure: Measure, model: str) -> Distribution:
        """To observe into; the same object for the same arguments."""
        by_model = self._distributions[measure]
        found = by_model.get(model)
        if found is None:
            found = by_model[model] = Distribution(measure.bounds)
        return found

    def generated(self, model: str) -> Tally:
        """Tokens received from workers; the same object for the same model."""
        return self._generated.setdefault(model, Tally())

    def started(self, tenant: str) -> None:
        """tenant: as `tenants` labels it."""
        self._started += 1
        self.tenant_requests.labels(tenant).inc()
        self.in_flight.inc()

    def failed(self, reason: str) -> None:
        """reason: one of our own codes, never a text."""
        self._failed += 1
        self.failures.labels(reason).inc()

    def text(self) -> str:
        """In Prometheus' form. Every second, on the event loop: it has to be quick."""
        return generate_latest(self._registry).decode() + self._counted().render()

    def counts(self) -> RouterCounts:
        """All models together."""
        return RouterCounts(
            requests=self._started,
            failures=self._failed,
            ttft=_summed(self._distributions[TTFT].values()),
            itl=_summed(self._distributions[ITL].values()),
        )

    def _counted(self) -> Exposition:
        """What is not in the registry; the distributions under our name and under vLLM's."""
        out = Exposition()
        tokens = "decodefleet_router_generated_tokens_total"
        for model, tally in [*self._generated.items()]:
            out.record(tokens, "counter", "Tokens received from workers.", tally.count, {"model_name": model})
        for measure, by_model in self._distributions.items():
            for name in filter(None, (measure.name, measure.alias)):
                family = out.family(name, "histogram", measure.documentation)
                # a copy: another thread may read while a model comes
                for model, found in [*by_model.items()]:
                    label = ("model_name", model)
                    cumulated = [*accumulate(found.counts)]
                    for end, count in zip((*map(str, found.bounds), "+Inf"), cumulated, strict=True):
                        family.add(f"{name}_bucket", (label, ("le", end)), count)
                    family.add(f"{name}_count", (label,), cumulated[-1])
                    family.add(f"{name}_sum", (label,), found.total)
        return out

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"decodefleet_router_{name}", documentation, labels, registry=self._registry)


def _summed(distributions: Iterable[Distribution]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(found.counts for found in distributions), strict=True)))

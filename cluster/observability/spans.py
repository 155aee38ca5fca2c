"""OpenTelemetry spans of a request, made by the router for scheduler and worker, too.

A request's whole way is known here, from its timeline: spans are made once it has ended, with the times that
were noted on the way, so that tracing costs nothing while tokens flow, and the worker needs no telemetry.
Imported only where traces are asked for (`tracing.open_tracing`). OpenTelemetry's own variables hold.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .exchange import Exchange
from .timeline import Attempt, Timeline

HEADERS = ("traceparent", "tracestate")


class Tracing:
    """endpoint: of OTLP over HTTP, the path included, e.g. http://127.0.0.1:4318/v1/traces.

    Spans are sent by a thread, in batches; what cannot be sent is dropped. exporter: instead of one for the
    endpoint.
    """

    def __init__(self, endpoint: str, instance: str, exporter: SpanExporter | None = None) -> None:
        resource = Resource.create({"service.instance.id": instance})
        # else OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES have named it
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "decodefleet"}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("decodefleet")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str]) -> Span:
        """The span of a request, in the trace that its headers name."""
        carrier = {name: headers[name] for name in HEADERS if name in headers}
        context = self._propagator.extract(carrier)
        return self._tracer.start_span("request", context=context, kind=SpanKind.SERVER)

    def end(self, exchange: Exchange) -> None:
        """Name the request's span, where it has one, and make those of its parts."""
        span = exchange.span
        if span is None:
            return
        if span.is_recording():
            clock = _Clock()
            span.update_name(f"{exchange.method} {exchange.route}")
            span.set_attributes(_known(_about(exchange)))
            if exchange.error is not None:
                _fail(span, exchange.error)
            for timeline in exchange.timelines:
                self._generation(span, timeline, clock)
        span.end()

    def close(self) -> None:
        """Send what is left; waits for it."""
        self._provider.shutdown()

    def _generation(self, parent: Span, timeline: Timeline, clock: _Clock) -> None:
        ended = timeline.ended if timeline.ended is not None else time.monotonic()
        span = self._child(parent, "generate", timeline.began, _generated(timeline), clock)
        for number, attempt in enumerate(timeline.attempts):
            self._attempt(span, number, attempt, ended, clock)
        span.end(clock.ns(ended))

    def _attempt(self, parent: Span, number: int, attempt: Attempt, ended: float, clock: _Clock) -> None:
        placement = attempt.placement
        placed = attempt.placed if attempt.placed is not None else ended
        about: dict[str, Any] = {"decodefleet.attempt": number}
        if placement is not None:
            about |= {
                "decodefleet.worker.id": placement.worker_id,
                "decodefleet.scheduler.epoch": placement.epoch,
                "decodefleet.scheduler.predicted_s": placement.predicted_s,
                "decodefleet.scheduler.cached_tokens": placement.cached_tokens,
            }
        place = self._child(parent, "router.place", attempt.asked, about, clock)
        if placement is None:
            if attempt.error is not None:
                _fail(place, attempt.error)
        else:
            queued = max(attempt.asked, placed - placement.waited_s)
            self._span(place, "scheduler.queue", queued, placed, clock)
        place.end(clock.ns(placed))
        if placement is not None:
            self._worker(parent, attempt, placed, ended, about, clock)

    def _worker(
        self,
        parent: Span,
        attempt: Attempt,
        placed: float,
        ended: float,
        about: Mapping[str, Any],
        clock: _Clock,
    ) -> None:
        ended = attempt.ended if attempt.ended is not None else ended
        span = self._child(parent, "worker", placed, about, clock)
        span.set_attribute("decodefleet.tokens", attempt.tokens)
        if attempt.error is not None:
            _fail(span, attempt.error)
        if attempt.first_token is not None:
            began = min(placed + (attempt.queued_s or 0.0), attempt.first_token)
            self._span(span, "worker.queue", placed, began, clock)
            self._span(span, "worker.prefill", began, attempt.first_token, clock)
            self._span(span, "worker.decode", attempt.first_token, ended, clock)
        span.end(clock.ns(ended))

    def _child(self, parent: Span, name: str, began: float, about: Mapping[str, Any], clock: _Clock) -> Span:
        return self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            attributes=_known(about),
            start_time=clock.ns(began),
        )

    def _span(self, parent: Span, name: str, began: float, ended: float, clock: _Clock) -> None:
        self._child(parent, name, began, {}, clock).end(clock.ns(ended))


class _Clock:
    """From monotonic seconds to Unix nanoseconds."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset


def _about(exchange: Exchange) -> dict[str, Any]:
    return {
        "http.request.method": exchange.method,
        "http.route": exchange.route,
        "http.response.status_code": exchange.status,
        "error.type": exchange.error,
        "decodefleet.request.id": exchange.request_id,
        "decodefleet.outcome": exchange.outcome,
    }


def _generated(timeline: Timeline) -> dict[str, Any]:
    """OpenTelemetry's names for generative models, and vLLM's where it has none."""
    return {
        "gen_ai.request.id": timeline.request_id,
        "gen_ai.response.model": timeline.model,
        "gen_ai.usage.prompt_tokens": timeline.prompt_tokens,
        "gen_ai.usage.completion_tokens": timeline.generated_tokens,
        "gen_ai.usage.cached_tokens": timeline.cached_tokens,
        "gen_ai.response.finish_reasons": timeline.finish_reasons or None,
        "gen_ai.latency.time_in_queue": timeline.queue_s,
        "gen_ai.latency.time_to_first_token": timeline.ttft_s,
        "gen_ai.latency.time_in_model_decode": timeline.decode_s,
        "decodefleet.tenant": timeline.tenant or None,
    }


def _known(about: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in about.items() if value is not None}


def _fail(span: Span, text: str) -> None:
    span.set_status(Status(StatusCode.ERROR, text))

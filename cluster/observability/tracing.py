"""The door to tracing: opens it where an endpoint is given, and loads OpenTelemetry only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from .spans import Tracing

NEEDS = "traces need the OpenTelemetry exporter: pip install 'decodefleet[otel]'"
# answered to the client, so that it can find the trace (W3C Trace Context, level 2)
RESPONSE_HEADER = "traceresponse"


class TracingUnavailable(RuntimeError):
    """An endpoint is given, and the packages that could send to it are not there."""


def open_tracing(endpoint: str | None, instance: str) -> Tracing | None:
    """instance: which router this is. Raises TracingUnavailable."""
    if endpoint is None:
        return None
    try:
        from .spans import Tracing
    except ImportError as error:
        raise TracingUnavailable(NEEDS) from error
    return Tracing(endpoint, instance)


def response_header(span: Span) -> str:
    """What tells a client where its trace is."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

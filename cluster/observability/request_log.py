"""One line per HTTP request: as fields for JSON logs, and as words in which no value can start a new line.

Prompts, answers and keys are never in it.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from .exchange import Exchange

log = logging.getLogger("decodefleet.requests")

# answers about the service itself are asked for by machines, several times a minute: no line, no trace
_QUIET = frozenset({"/", "/health", "/ready", "/metrics", "/version", "/debug/fleet"})
_PLAIN = re.compile(r"[\w.:/{}+-]+", re.ASCII)


def is_quiet(route: str) -> bool:
    """route: or the path itself, before it is known which route that is."""
    return route in _QUIET or route.startswith("/page/")


def fields_of(exchange: Exchange) -> dict[str, Any]:
    """What a line tells; what is not known is left out. Times are seconds."""
    ended = exchange.ended if exchange.ended is not None else exchange.began
    told: dict[str, Any] = {
        "id": exchange.request_id,
        "method": exchange.method,
        "route": exchange.route,
        "status": exchange.status,
        "outcome": exchange.outcome,
        "duration_s": round(ended - exchange.began, 6),
    }
    if exchange.span is not None:
        told["trace_id"] = format(exchange.span.get_span_context().trace_id, "032x")
    return told | _generations(exchange)


def words_of(fields: dict[str, Any]) -> str:
    """`key=value` by blanks; values with anything but plain characters are quoted and escaped as in JSON."""
    return " ".join(f"{key}={_word(value)}" for key, value in fields.items())


def log_exchange(exchange: Exchange, *, as_fields: bool = False) -> None:
    """as_fields: the handlers write the record's `request`, so its message need not repeat that."""
    level = logging.DEBUG if is_quiet(exchange.route) else logging.INFO
    if log.isEnabledFor(level):
        fields = fields_of(exchange)
        log.log(level, "%s", "request" if as_fields else words_of(fields), extra={"request": fields})


def _generations(exchange: Exchange) -> dict[str, Any]:
    timelines = exchange.timelines
    if not timelines:
        return {}
    first = min(timelines, key=lambda timeline: timeline.ttft_s or float("inf"))
    told = {
        "generation": first.request_id,
        "model": first.model,
        "tenant": first.tenant or None,
        "prompts": len(timelines) if len(timelines) > 1 else None,
        "prompt_tokens": sum(timeline.prompt_tokens for timeline in timelines),
        "cached_tokens": sum(timeline.cached_tokens for timeline in timelines),
        "generated_tokens": sum(timeline.generated_tokens for timeline in timelines),
        "queue_s": first.queue_s,
        "ttft_s": first.ttft_s,
        "tpot_s": first.tpot_s,
        "longest_gap_s": max(timeline.longest_gap_s for timeline in timelines) or None,
        "worker": first.worker_id,
        "attempts": max(len(timeline.attempts) for timeline in timelines),
    }
    return {
        key: round(value, 6) if isinstance(value, float) else value
        for key, value in told.items()
        if value is not None
    }


def _word(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)

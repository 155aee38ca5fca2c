"""The Grafana dashboards, written down once: `python deploy/grafana/dashboards.py` writes dashboards/*.json.

A panel is a title, a unit and its queries; `panels.py` makes Grafana's JSON of that. A test holds that the
files are current, that every query parses and that every metric in them exists.
"""

from __future__ import annotations

import math
from pathlib import Path

from panels import (
    JOB,
    MODEL,
    Dashboard,
    Panel,
    heatmap,
    latency,
    number,
    percentiles,
    rate,
    render,
    stacked,
    total,
)

FOLDER = Path(__file__).with_name("dashboards")

ROUTER = "decodefleet_router"
HITS = f"{rate('decodefleet_prefix_cache_hits_total')} / {rate('decodefleet_prefix_cache_queries_total')}"
ANSWERS = f"{ROUTER}_requests_total"
# a fleet without a single error is 0, not unknown
FAILED = rate(ANSWERS, f'{JOB}, status=~"5.."')
ERRORS = f"({FAILED} or vector(0)) / {rate(ANSWERS, JOB)}"

FLEET = Dashboard(
    "decodefleet-fleet",
    "decodefleet / fleet",
    (
        (
            "Now",
            (
                number(
                    "Workers",
                    "short",
                    total("decodefleet_workers", JOB + ', state="serving"'),
                    "Those that can generate.",
                    good=(1, math.inf),
                ),
                number("Running", "short", total("decodefleet_sequences_running")),
                number("Queued", "short", total("decodefleet_scheduler_queue_length", JOB)),
                number(
                    "KV in use",
                    "percentunit",
                    f"max (decodefleet_kv_cache_usage{{{MODEL}}})",
                    "Of the model that uses most.",
                    good=(0, 0.95),
                ),
                number("Prefix hit rate", "percentunit", HITS, "Prompt tokens that a cache supplied."),
                number(
                    "TTFT p95",
                    "s",
                    percentiles(f"{ROUTER}_time_to_first_token_seconds", 0.95)[0][0],
                    "Time to first token; the latest that was measured.",
                    good=(0, 2.5),
                ),
                number(
                    "ITL p95",
                    "s",
                    percentiles(f"{ROUTER}_inter_token_latency_seconds", 0.95)[0][0],
                    "Time between tokens; the latest that was measured.",
                    good=(0, 0.2),
                ),
                number(
                    "Errors",
                    "percentunit",
                    ERRORS,
                    "Share of HTTP answers with a status of 5xx.",
                    good=(0, 0.01),
                ),
            ),
        ),
        (
            "What clients feel",
            (
                latency("Time to first token", f"{ROUTER}_time_to_first_token_seconds"),
                latency("Between tokens", f"{ROUTER}_inter_token_latency_seconds"),
                stacked("Answers by status", "reqps", f"{ROUTER}_requests_total", "status"),
                Panel(
                    "Tokens",
                    "short",
                    (
                        (rate("decodefleet_generation_tokens_total"), "generated per s"),
                        (rate("decodefleet_prompt_tokens_total"), "prompt per s"),
                    ),
                ),
            ),
        ),
        (
            "Load",
            (
                Panel(
                    "Sequences",
                    "short",
                    (
                        (total("decodefleet_sequences_running"), "running"),
                        (total("decodefleet_sequences_waiting"), "waiting in workers"),
                        (total("decodefleet_sequences_restoring"), "restoring KV"),
                        (total("decodefleet_scheduler_queue_length", JOB), "queued in the scheduler"),
                    ),
                ),
                Panel(
                    "Workers",
                    "short",
                    ((total("decodefleet_workers", JOB, "state"), "{{state}}"),),
                    stack=True,
                ),
                Panel(
                    "KV cache in use",
                    "percentunit",
                    ((f"max by (model_name) (decodefleet_kv_cache_usage{{{MODEL}}})", "{{model_name}}"),),
                ),
                stacked("Refused", "reqps", "decodefleet_scheduler_refusals_total", "reason"),
            ),
        ),
    ),
)

REQUESTS = Dashboard(
    "decodefleet-requests",
    "decodefleet / requests",
    (
        (
            "Where the time goes",
            (
                latency(
                    "Queue", f"{ROUTER}_queue_time_seconds", "Waiting for a placement, and in the worker.", 8
                ),
                latency("Prefill", f"{ROUTER}_prefill_time_seconds", width=8),
                latency("Decode", f"{ROUTER}_decode_time_seconds", width=8),
                latency("Whole request", f"{ROUTER}_e2e_request_latency_seconds"),
                latency("Time per output token", f"{ROUTER}_time_per_output_token_seconds"),
                heatmap("Time to first token", "s", f"{ROUTER}_time_to_first_token_seconds"),
                heatmap("Between tokens", "s", f"{ROUTER}_inter_token_latency_seconds"),
            ),
        ),
        (
            "What is asked for",
            (
                heatmap("Prompt tokens", "short", f"{ROUTER}_request_prompt_tokens"),
                heatmap("Generated tokens", "short", f"{ROUTER}_request_generated_tokens"),
                stacked("Requests by tenant", "reqps", f"{ROUTER}_tenant_requests_total", "tenant"),
                stacked("Tokens per second, by tenant", "short", f"{ROUTER}_tenant_tokens_total", "tenant"),
            ),
        ),
        (
            "What goes wrong",
            (
                stacked("Failed generations", "reqps", f"{ROUTER}_failures_total", "reason", width=6),
                Panel(
                    "Moved to another worker",
                    "reqps",
                    (
                        (rate(f"{ROUTER}_retries_total", JOB), "moved"),
                        (rate(f"{ROUTER}_migrations_total", JOB), "of them in the middle of an answer"),
                    ),
                    width=6,
                ),
                latency("Until a moved answer goes on", f"{ROUTER}_resume_seconds", width=6),
                stacked(
                    "How sequences end",
                    "reqps",
                    "decodefleet_requests_finished_total",
                    "finished_reason",
                    MODEL,
                    width=6,
                ),
            ),
        ),
    ),
)

TIER = "decodefleet_kv_tier"
KV = Dashboard(
    "decodefleet-kv",
    "decodefleet / KV cache",
    (
        (
            "Prefix cache",
            (
                Panel("Hit rate", "percentunit", ((HITS, "of prompt tokens"),)),
                Panel(
                    "Blocks of the pool",
                    "short",
                    (
                        (
                            f"{total('decodefleet_kv_blocks')} - {total('decodefleet_kv_blocks_free')}"
                            f" - {total('decodefleet_kv_blocks_cached')}",
                            "in use",
                        ),
                        (total("decodefleet_kv_blocks_cached"), "cached"),
                        (total("decodefleet_kv_blocks_free"), "free"),
                    ),
                    stack=True,
                ),
                Panel(
                    "Preemptions",
                    "short",
                    (
                        (rate("decodefleet_preemptions_total"), "preempted per s"),
                        (rate("decodefleet_swapped_sequences_total"), "of them kept below"),
                    ),
                ),
                Panel(
                    "Evicted blocks per second",
                    "short",
                    ((rate(f"{TIER}_evicted_blocks_total", by="tier, fate"), "{{tier}}: {{fate}}"),),
                ),
            ),
        ),
        (
            "Tiers",
            (
                Panel(
                    "Filled, what is only cached included",
                    "percentunit",
                    (
                        (
                            f"{total(f'{TIER}_blocks_held', by='tier')}"
                            f" / {total(f'{TIER}_blocks', by='tier')}",
                            "{{tier}}",
                        ),
                    ),
                ),
                Panel(
                    "Restored",
                    "Bps",
                    ((rate(f"{TIER}_restored_bytes_total", by="tier"), "from {{tier}}"),),
                ),
                Panel("Stored", "Bps", ((rate(f"{TIER}_stored_bytes_total", by="tier"), "to {{tier}}"),)),
                Panel(
                    "Standstill for copies",
                    "percentunit",
                    ((rate("decodefleet_kv_stall_seconds_total"), "of one worker's time"),),
                ),
            ),
        ),
        (
            "Prefix directory",
            (
                Panel(
                    "Reachable",
                    "bool_yes_no",
                    ((f"min (decodefleet_scheduler_directory_up{{{JOB}}})", "directory"),),
                    width=8,
                ),
                Panel(
                    "Age of its news",
                    "s",
                    ((f"max (decodefleet_scheduler_directory_lag_seconds{{{JOB}}})", "lag"),),
                    width=8,
                ),
                Panel(
                    "Blocks in the index",
                    "short",
                    ((total("decodefleet_scheduler_prefix_index_blocks", JOB), "blocks"),),
                    width=8,
                ),
            ),
        ),
    ),
)

DASHBOARDS = (FLEET, REQUESTS, KV)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.uid}.json").write_text(render(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()

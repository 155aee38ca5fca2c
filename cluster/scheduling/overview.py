"""The fleet at a glance, as plain data: what `/debug/fleet`, the page at `/` and `decodefleet top` show.

Reads the scheduler's core and changes nothing. Fields are only ever added: pages of another version read it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..observability.worker_metrics import used_blocks
from .fleet import Member
from .history import STEP_S, History
from .scheduler import GlobalScheduler

PLACEMENTS = 20
CANDIDATES = 4


def overview(core: GlobalScheduler, history: History, now: float, at: float, since: float) -> dict[str, Any]:
    """now: monotonic, at: the same moment as Unix time. since: Unix time; what came before is left out."""
    offset = at - now
    return {
        "at": at,
        "epoch": core.epoch,
        "policy": core.config.policy,
        "models": [{"name": card.name, "max_model_len": card.max_model_len} for card in core.fleet.cards],
        "workers": [
            _worker(core, member, now)
            for member in sorted(core.fleet, key=lambda member: member.key.worker_id)
        ],
        "changes": msgspec.to_builtins(history.changes(since)),
        "sleeps": core.config.sleeps,
        "routers": len(core.routers),
        "queue": {
            "length": len(core.queue),
            "limit": core.config.max_queue,
            "oldest_s": max((now - waiter.arrived for waiter in core.queue), default=0.0),
        },
        "prefix_index": {"blocks": len(core.index), "directory_up": core.directory_up},
        "placed": core.placements,
        "refused": dict(core.refused),
        "placements": [
            _placement(decision, offset)
            for decision in core.log.recent(PLACEMENTS, since=since - offset, candidates=CANDIDATES)
        ],
        "history": {"step_s": STEP_S, "points": msgspec.to_builtins(history.since(since))},
    }


def _worker(core: GlobalScheduler, member: Member, now: float) -> dict[str, Any]:
    stats = member.stats
    return {
        "id": member.key.worker_id,
        "incarnation": member.key.incarnation,
        "model": member.card.name,
        "state": core.fleet.fence(member, now) or "serving",
        "heard_s": now - member.last_heartbeat,
        "running": stats.running,
        "waiting": stats.waiting,
        "restoring": stats.restoring,
        "max_running": stats.max_running,
        "prefill_tokens": stats.waiting_prefill_tokens,
        "kv": {
            "total": stats.total_blocks,
            "used": used_blocks(stats),
            "cached": stats.cached_blocks,
            "block_tokens": member.card.block_size,
        },
        "tiers": {
            name: {
                "total": tier.total_blocks,
                "used": tier.used_blocks,
                "restored": tier.restored_blocks,
                "bytes_per_s": tier.bytes_per_s,
            }
            for name, tier in stats.tiers.items()
        },
        "steps": stats.steps,
        "busy_for_s": stats.busy_for_s,
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "query_tokens": stats.prefix_query_tokens,
        "hit_tokens": stats.prefix_hit_tokens,
        "preemptions": stats.preemptions,
        "reserved": core.ledger.load(member.key).sequences,
    }


def _placement(decision: dict[str, Any], offset: float) -> dict[str, Any]:
    kept = ("request_id", "attempt", "waited_s", "prompt_tokens", "hit_tokens", "worker_id", "refused")
    return {
        "at": decision["at"] + offset,
        **{name: decision[name] for name in (*kept, "candidates")},
        "considered": [
            {name: one[name] for name in ("worker_id", "hit_tokens", "cost_s")}
            for one in decision["considered"]
        ],
    }

"""What the global scheduler may be told; times in seconds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PolicyName = Literal["cost", "round-robin", "least-load", "prefix-only"]

# requests of one model: the bound on memory, where `max_queue_wait_s` is the one on time
MAX_QUEUE = 4096


class SchedulingConfig(BaseModel):
    """Frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyName = Field("cost", description="how a worker is chosen; cost is the product")
    late_binding: bool = Field(
        True,
        description="requests wait here for a worker with room; if not, each waits in a worker",
    )
    bind_ahead_s: float = Field(
        0.5,
        ge=0,
        description="with late binding: prefill in seconds that a worker may have queued and still get more",
    )
    max_queue: int = Field(MAX_QUEUE, ge=0, description="requests that may wait for a worker of one model")
    max_queue_wait_s: float = Field(
        30.0, gt=0, description="predicted wait beyond which a request is refused rather than queued"
    )
    decode_token_weight: float = Field(
        2.0,
        gt=0,
        description="what an output token counts in a tenant's share; an uncached prompt token is 1",
    )
    tenant_headroom: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="most of the seats that tenants beyond their share leave free while others are active",
    )
    max_sessions: int = Field(
        65_536,
        ge=0,
        description="sessions whose last worker is remembered, to which they return if it costs little",
    )
    worker_timeout_s: float = Field(3.0, gt=0, description="silence after which a worker counts as dead")
    router_timeout_s: float = Field(10.0, gt=0, description="silence after which a router counts as gone")
    no_worker_grace_s: float = Field(
        10.0, ge=0, description="how long requests wait for a model whose workers are all away"
    )
    sleeps: bool = Field(
        False, description="a model of which no worker is there counts as ready: one will come when asked for"
    )
    report_grace_s: float = Field(
        3.0, ge=0, description="age at which a reservation that its router no longer lists is dropped"
    )
    speculative_ttl_s: float = Field(
        2.0, ge=0, description="how long a dispatched prefix counts as held until the directory confirms it"
    )
    memory_ttl_s: float = Field(120.0, ge=0, description="the same while the directory cannot be reached")
    max_index_blocks: int = Field(2_000_000, ge=1, description="most block hashes in the local prefix index")
    decision_log: int = Field(4096, ge=1, description="placements kept for /debug/placements")

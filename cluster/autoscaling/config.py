"""What decides how many workers and routers there are; times in seconds."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from decodefleet.worker.config import Frozen


class ScalingConfig(Frozen):
    """Of the workers of one model; one worker is one tensor-parallel gang, whatever its number of GPUs."""

    min_workers: int = Field(1, ge=0, description="fewest workers; 0 lets an idle model go")
    max_workers: int = Field(1, ge=1, description="most workers")
    ttft_target_s: float = Field(2.0, gt=0, description="time to first token that is to be kept")
    itl_target_s: float = Field(0.1, gt=0, description="time per further token that is to be kept")
    attainment: float = Field(0.99, gt=0, lt=1, description="share of requests for which both are to be kept")
    kv_share: float = Field(0.9, gt=0, le=1, description="of the KV pool that may be in use")
    headroom: float = Field(0.0, ge=0, description="load that is reckoned with beyond what is expected")
    window_s: float = Field(60.0, gt=0, description="of the past that stands for what comes")
    startup_s: float = Field(60.0, ge=0, description="a new worker's start, until one has been seen")
    hold_s: float = Field(
        240.0,
        ge=0,
        description="how long fewer workers must have been enough to let one go; less as load falls",
    )
    idle_s: float = Field(600.0, ge=0, description="without any request, after which the last worker goes")

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_workers < self.min_workers:
            raise ValueError(f"max_workers {self.max_workers} is below min_workers {self.min_workers}")
        return self

    def bounded(self, workers: int) -> int:
        return max(self.min_workers, min(self.max_workers, workers))


class ScalingOptions(Frozen):
    """What `serve` can be told; numbers of replicas are fixed where no maximum is given."""

    max_workers: int | None = Field(
        None, ge=1, le=1024, description="most model replicas; given, their number follows the load"
    )
    min_workers: int = Field(
        1,
        ge=0,
        description="fewest model replicas; 0 lets an idle model go until a request comes",
    )
    max_routers: int | None = Field(
        None, ge=1, le=256, description="most router replicas; given, their number follows streams and CPU"
    )
    ttft_target_ms: float = Field(
        2000.0, gt=0, description="time to first token to be kept; per further token --itl-target-ms is"
    )
    scale_headroom: float = Field(
        0.0, ge=0, description="load that is reckoned with beyond what is expected: 0.2 is a fifth"
    )
    scale_in_s: float = Field(
        240.0,
        ge=0,
        description="seconds for which fewer replicas must have been enough before one goes; "
        "less, the surer it is that the load falls",
    )
    idle_s: float = Field(600.0, ge=0, description="seconds without a request until the last replica goes")
    cold_start_s: float = Field(
        600.0, ge=0, description="seconds that requests wait for a model of which no replica is there"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers {self.max_workers} is below min_workers {self.min_workers}")
        return self

    def of_workers(self, itl_target_ms: float) -> ScalingConfig | None:
        """None where their number is fixed. itl_target_ms: as the batcher has it; 0 means none."""
        if self.max_workers is None:
            return None
        return ScalingConfig(
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            ttft_target_s=self.ttft_target_ms / 1000,
            itl_target_s=itl_target_ms / 1000 or ScalingConfig().itl_target_s,
            headroom=self.scale_headroom,
            hold_s=self.scale_in_s,
            idle_s=self.idle_s,
        )

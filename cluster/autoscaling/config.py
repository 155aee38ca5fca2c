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
    attainment: float = Field(
        0.995, gt=0, lt=1, description="share of requests for which both are to be kept"
    )
    kv_share: float = Field(0.9, gt=0, le=1, description="of the KV pool that may be in use")
    headroom: float = Field(0.2, ge=0, description="growth of load that is reckoned with in any case")
    window_s: float = Field(90.0, gt=0, description="of the past that stands for what comes")
    startup_s: float = Field(60.0, ge=0, description="a new worker's start, until one has been seen")
    hold_s: float = Field(
        150.0, ge=0, description="how long fewer workers must have been enough to let one go"
    )
    idle_s: float = Field(600.0, ge=0, description="without any request, after which the last worker goes")

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_workers < self.min_workers:
            raise ValueError(f"max_workers {self.max_workers} is below min_workers {self.min_workers}")
        return self

    def bounded(self, workers: int) -> int:
        return max(self.min_workers, min(self.max_workers, workers))

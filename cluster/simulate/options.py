"""What `decodefleet simulate` can be told; its flags are made from these fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from decodefleet.worker.config import BatchConfig, Frozen

from ..scheduling.config import MAX_QUEUE

LOAD = "Load"
FLEET = "Fleet"
SCALING = "Autoscaling"
RESULT = "Result"


class SimulateError(Exception):
    """The simulation cannot be run as asked; the message says what to do."""


def _option(default: Any, panel: str, description: str, **extra: Any) -> Any:
    limits = {name: extra.pop(name) for name in ("ge", "gt") if name in extra}
    return Field(default, description=description, json_schema_extra={"panel": panel, **extra}, **limits)


def _split(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [part.strip() for item in value for part in item.split(",") if part.strip()]
    return value


Names = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_split)]
Positive = Annotated[float, Field(gt=0)]


class SimulateOptions(Frozen):
    """One run per policy."""

    trace: Path = _option(..., LOAD, "requests to replay, always needed: Mooncake .jsonl or Azure .csv")
    requests: int | None = _option(None, LOAD, "only the first so many", ge=1)
    skip: int = _option(0, LOAD, "leave out so many at the start", ge=0)
    trace_speed: Positive = _option(1.0, LOAD, "2 replays the trace twice as fast")
    rate: float | None = _option(None, LOAD, "requests per second on average, instead of --trace-speed", gt=0)
    copies: int = _option(1, LOAD, "play it so many times at once, for users with no common prefix", ge=1)
    max_queue: int = _option(
        MAX_QUEUE, LOAD, "requests that may wait in the scheduler; more are refused", ge=0
    )
    ttft_target_ms: Positive = _option(2000.0, LOAD, "time to first token that counts as good")
    tpot_target_ms: Positive = _option(100.0, LOAD, "time per further token that counts as good")

    workers: int = _option(16, FLEET, "model replicas", ge=1)
    policy: Names = _option(("cost",), FLEET, "placement (see above); several by commas, a run each")
    gpu: str = _option("h100", FLEET, "what a worker runs on: a100, h100, h200 or b200")
    tensor_parallel_size: int = _option(1, FLEET, "GPUs per worker", ge=1)
    model: str = _option(
        "llama-3-8b", FLEET, "llama-3-8b, llama-3-70b, qwen3-32b, or a folder with config.json"
    )
    step_time: Path | None = _option(
        None, FLEET, "JSON with a real run's base, prefill_token, kv_token, sequence (s) instead of --gpu's"
    )
    kv_tokens: int | None = _option(
        None, FLEET, "KV pool of a worker in tokens; what fits the GPU if not given", ge=1
    )
    block_size: int = _option(
        64, FLEET, "tokens per KV block; divides 512; smaller is closer to life, and slower", ge=1
    )
    max_num_seqs: int = _option(256, FLEET, "most sequences running at once, per worker", ge=1)
    max_num_batched_tokens: int = _option(2048, FLEET, "token budget of one step", ge=1)
    itl_target_ms: float = _option(
        BatchConfig().itl_target_ms, FLEET, "prefill beside decodes is cut for steps to take no longer", ge=0
    )
    heartbeat_ms: Positive = _option(250.0, FLEET, "between a worker's reports")
    directory_ms: float = _option(30.0, FLEET, "until the scheduler hears of a block that came or went", ge=0)

    max_workers: int | None = _option(
        None, SCALING, "most model replicas; given, their number follows the load instead of --workers", ge=1
    )
    min_workers: int = _option(1, SCALING, "fewest model replicas", ge=1)
    startup_s: float = _option(60.0, SCALING, "seconds from ordering a worker until it serves", ge=0)
    scale_in_s: float = _option(
        240.0, SCALING, "seconds for which fewer must have been enough before one goes", ge=0
    )
    scale_headroom: float = _option(
        0.0, SCALING, "load that is reckoned with beyond what is expected: 0.2 is a fifth", ge=0
    )

    seed: int = _option(0, RESULT, "of the choice among equals; same seed, same result")
    output: Path | None = _option(None, RESULT, "write everything to this JSON file", short="-o")
    plot: Path | None = _option(None, RESULT, "draw the runs into this SVG file")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"--max-workers {self.max_workers} is below --min-workers {self.min_workers}")
        return self

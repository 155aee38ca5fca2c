"""What tells a hang from a long step."""

from __future__ import annotations

import pytest

from decodefleet.worker.stats import StepTime, WorkerStats

STEP_TIME = StepTime(base=0.01, prefill_token=0.001, kv_token=0.0, sequence=0.001)


@pytest.mark.parametrize(
    ("busy_for_s", "fields", "overdue"),
    [
        (None, {}, False),
        (9.0, {}, False),
        (11.0, {}, True),
        # 2,000 tokens of prefill take 2 s, and may take 40
        (11.0, {"waiting_prefill_tokens": 2000}, False),
        (41.0, {"waiting_prefill_tokens": 2000}, True),
        # of which no step computes more than 500
        (11.0, {"waiting_prefill_tokens": 2000, "max_step_tokens": 500}, True),
        # an engine that has not told its pace gets a second for a step
        (19.0, {"step_time": None}, False),
        (21.0, {"step_time": None}, True),
    ],
)
def test_overdue(busy_for_s: float | None, fields: dict[str, object], overdue: bool) -> None:
    stats = WorkerStats(**{"busy_for_s": busy_for_s, "step_time": STEP_TIME} | fields)  # type: ignore[arg-type]
    assert stats.overdue(10.0) is overdue

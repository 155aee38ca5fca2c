"""A live server whose workers follow the load: one, three, one, none, and back, with no request lost.

`tests/bench/live_autoscaling.py` draws the same run.
"""

from __future__ import annotations

import os

import pytest
from live_scaling import follow_load, lost, scaled_fleet


@pytest.mark.slow
@pytest.mark.skipif(
    "DECODEFLEET_LONG" not in os.environ, reason="takes six minutes: DECODEFLEET_LONG=1 runs it"
)
@pytest.mark.timeout(900)
async def test_one_three_one_none_and_back(tmp_path):
    with scaled_fleet(tmp_path / "serve.log") as served:
        seen = await follow_load(served)
    assert len(seen.replies) > 370
    assert lost(seen.replies) == 0

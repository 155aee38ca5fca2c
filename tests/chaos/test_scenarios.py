"""Parts of a cluster die under 40 streams: each stream's answer is as in peace, and all comes back.

CI runs each scenario once; `make chaos` many times. CHAOS_SEED repeats a run, CHAOS_SCENARIO picks one,
CHAOS_MODEL=real takes SmolLM2 instead of fake engines, CHAOS_MODEL=ranks a tiny model on two ranks.
"""

from __future__ import annotations

import pytest
from chaos_cluster import Cluster, Scenario, disturb
from chaos_report import RANKS, REPEAT, SCENARIO, SEED, outcomes
from chaos_scenarios import SCENARIOS

STREAMS = 40
WANTED = [
    scenario for scenario in SCENARIOS if SCENARIO in (None, "", scenario.name) and scenario.ranks <= RANKS
]

# beyond any limit of a scenario, so that it is the scenario that tells what was awaited
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.mark.parametrize("repetition", range(REPEAT))
@pytest.mark.parametrize("scenario", WANTED, ids=lambda scenario: scenario.name)
def test_all_streams_end_as_in_peace(cluster: Cluster, scenario: Scenario, repetition: int) -> None:
    outcome = disturb(cluster, scenario, SEED + repetition, STREAMS)
    outcomes.append(outcome)
    print(f"\n{outcome}", flush=True)
    assert outcome.faults == []

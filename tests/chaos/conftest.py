"""The cluster that all scenarios share, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_cluster import Cluster
from chaos_report import REAL, SEED, outcomes, table
from chaos_streams import Length


@pytest.fixture(scope="session")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("chaos")
    if REAL:
        # the pools of three real workers have to fit beside each other
        cluster = Cluster(folder, str(smollm2), Length(12, 40), num_gpu_blocks_override=1500)
    else:
        cluster = Cluster(folder, str(smollm2), Length(150, 450), fake=True, fake_step_base_s=0.01)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if outcomes:
        terminalreporter.section(f"chaos, seed {SEED}")
        for line in table():
            terminalreporter.line(line)

"""The cluster that all scenarios share, and the table at the end."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from chaos_cluster import Cluster
from chaos_report import MODEL, RANKS, SEED, outcomes, table
from chaos_streams import Length


@pytest.fixture(scope="session")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("chaos")
    if MODEL == "real":
        # the pools of three real workers have to fit beside each other
        cluster = Cluster(folder, str(smollm2), Length(12, 40), num_gpu_blocks_override=1500)
    elif MODEL == "ranks":
        options = {"device": "cpu", "tensor_parallel_size": RANKS, "num_gpu_blocks_override": 1500}
        cluster = Cluster(folder, write_tiny(folder, smollm2), Length(60, 200), **options)
    else:
        cluster = Cluster(folder, str(smollm2), Length(150, 450), fake=True, fake_step_base_s=0.01)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What fails is told with the server's last words: its log goes with the run."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(cluster, Cluster):
        report.sections.append((f"end of {cluster.served.log}", cluster.last_words()))
    return report


def write_tiny(folder: Path, tokenizer: Path) -> str:
    """A model of random weights that takes little time."""
    import torch
    from tiny_families import SHAPE, write_random
    from transformers import LlamaConfig

    config = LlamaConfig(**{**SHAPE, "vocab_size": 49152, "max_position_embeddings": 2048})
    write_random(folder, config, torch.bfloat16)
    for file in tokenizer.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return str(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if outcomes:
        terminalreporter.section(f"chaos, seed {SEED}")
        for line in table():
            terminalreporter.line(line)

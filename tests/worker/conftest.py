"""Tiny random models for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import write_tiny_hybrid, write_tiny_llama, write_tiny_mistral
from live_worker import Worker
from tiny_gemma3 import write_tiny_gemma3


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mistral(tmp_path_factory.mktemp("tiny-mistral"), window=24)


@pytest.fixture(scope="session")
def tiny_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV groups: a full one and two that slide."""
    return write_tiny_hybrid(tmp_path_factory.mktemp("tiny-hybrid"), window=24)


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma3(tmp_path_factory.mktemp("tiny-gemma3"))


@pytest.fixture
def make_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(**options: Any) -> Worker:
        workers.append(Worker(tmp_path, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()

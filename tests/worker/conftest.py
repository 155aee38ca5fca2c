"""Tiny random models for tests of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import write_tiny_hybrid, write_tiny_llama, write_tiny_mistral
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

"""A tiny random model for tests of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))

"""Shared by all tests: what a machine has to have, and the real small model, fetched once into the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from decodefleet.worker.assets.resolve import resolve_model


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in Hugging Face form."""
    return resolve_model("smollm2-135m").folder

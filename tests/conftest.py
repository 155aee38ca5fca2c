"""Shared by all tests: what a machine has to have, and the real small model, fetched once into the cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from decodefleet.worker.assets.resolve import resolve_model

# the same examples in every run of CI: new ones are found where somebody can look at them
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in Hugging Face form."""
    return resolve_model("smollm2-135m").folder


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    """Folder of Gemma 3 270M (the base model) in Hugging Face form."""
    return resolve_model("gemma3-270m").folder

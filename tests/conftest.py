"""Shared by all tests: the real small model, fetched once into the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from decodefleet.worker.assets.resolve import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in Hugging Face form."""
    return resolve_model("smollm2-135m").folder

"""Triton kernels run on the GPU where there is one, in Triton's interpreter otherwise.

The interpreter is chosen when a kernel's module is imported, so this must come before any of them.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def half() -> torch.dtype:
    """The 16-bit type to test with: the interpreter rounds to bfloat16 by cutting off."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float16

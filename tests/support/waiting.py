"""Waits for what another process or task does, which has nobody to tell us; fails where it never comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# far longer than anything takes on a busy machine
PATIENCE_S = 240.0
LOOK_S = 0.02


def until(found: Callable[[], T], look_s: float = LOOK_S) -> T:
    """The first answer that is true."""
    give_up = time.monotonic() + PATIENCE_S
    while not (answer := found()):
        assert time.monotonic() < give_up, "it never came"
        time.sleep(look_s)
    return answer


async def eventually(found: Callable[[], T], look_s: float = LOOK_S) -> T:
    """The same, while the event loop goes on."""
    give_up = time.monotonic() + PATIENCE_S
    while not (answer := found()):
        assert time.monotonic() < give_up, "it never came"
        await asyncio.sleep(look_s)
    return answer

"""Ending asyncio tasks for good."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.1


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel and wait until the task is over; what it raised is not raised here.

    Cancels again until it takes: libraries swallow a cancellation that comes at certain moments (redis-py
    when it meets a connection that just broke, `asyncio.wait_for` of Python 3.11 when the result comes too).
    """
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=_AGAIN_S)
    if not task.cancelled():
        # asked for, so that asyncio does not report it as never looked at
        task.exception()

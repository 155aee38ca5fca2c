from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import zmq.asyncio
from tiny_peers import TinyPeer


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    await TinyPeer.end_all()
    context.destroy(linger=0)

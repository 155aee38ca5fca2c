from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq.asyncio
from router_scene import Scene
from tiny_peers import TinyPeer

from decodefleet.cluster.scheduling.config import SchedulingConfig
from decodefleet.cluster.scheduling.server import SchedulerServer


@pytest.fixture
async def scene(smollm2: Path) -> AsyncIterator[Scene]:
    context = zmq.asyncio.Context()
    scheduler = SchedulerServer(config=SchedulingConfig(no_worker_grace_s=0.2, worker_timeout_s=1.0), seed=1)
    await scheduler.start()
    scene = Scene(context, smollm2, scheduler)
    scene.router.start()
    yield scene
    await scene.router.close()
    await TinyPeer.end_all()
    await scene.scheduler.stop()
    context.destroy(linger=0)

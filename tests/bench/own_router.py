"""decodefleet's router without Ray, in front of workers that compute nothing: for `router_overhead.py`.

    python tests/bench/own_router.py --port 9001 --workers 2 --step-ms 20

This process is HTTP server, router, scheduler and the workers' supervisors; workers are processes of their
own. In production the scheduler is another process: its work counts here all the same. The event loop is
uvloop's, as in Ray's processes.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import uvicorn
import uvloop

from decodefleet.cluster.api.app import build_app
from decodefleet.cluster.api.settings import ApiSettings
from decodefleet.cluster.config import ServeConfig
from decodefleet.cluster.replica import Supervisor
from decodefleet.cluster.router import Router
from decodefleet.cluster.scheduling.server import SchedulerServer
from decodefleet.worker.config import BatchConfig, CacheConfig, FakeConfig


async def serve(port: int, workers: int, step_s: float) -> None:
    config = ServeConfig(
        model="smollm2-135m",
        served_model_name="tiny",
        fake=True,
        cache=CacheConfig(num_gpu_blocks_override=100_000),
        batch=BatchConfig(max_num_seqs=1024),
        fake_engine=FakeConfig(step_base_s=step_s),
    )
    scheduler = SchedulerServer()
    await scheduler.start()

    async def locate() -> tuple[str, int]:
        return scheduler.endpoint, scheduler.epoch

    supervisors = [Supervisor(config, f"worker-{number}", locate) for number in range(workers)]
    await asyncio.gather(*(supervisor.start() for supervisor in supervisors))
    router = Router(locate, None)
    router.start()
    # nobody asks for the fleet's views here
    fleet: Any = scheduler
    app = build_app(router, ApiSettings(), fleet=fleet)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
    try:
        await server.serve()
    finally:
        await router.close()
        await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
        await scheduler.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.workers, options.step_ms / 1000))


if __name__ == "__main__":
    main()

"""Entry point of a rank process: `python -m decodefleet.worker.rank --config FILE`.

Reads a WorkerConfig as JSON (the cluster secret comes by environment), builds the engine and serves until
told to stop. Dies with the parent it is told of. The engine is imported inside, so that a fake worker needs
no torch.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from .config import WorkerConfig
from .engine_api import EngineLike, Progress
from .logs import set_up_logging
from .protocol import EventSink
from .server import WorkerServer
from .transport import Security

SECRET_VARIABLE = "DECODEFLEET_CLUSTER_SECRET"
PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="decodefleet.worker.rank", description="one rank of a worker")
    parser.add_argument("--config", type=Path, required=True, help="WorkerConfig as JSON")
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--parent", type=int, help="process id of the parent to die with")
    options = parser.parse_args(argv)
    if options.parent is not None:
        die_with_parent(options.parent)
    set_up_logging(options.log_level, options.log_format)
    config = WorkerConfig.model_validate_json(options.config.read_text())

    def build_engine(sink: EventSink, progress: Progress) -> EngineLike:
        if config.fake is not None:
            from .fake import FakeEngine

            return FakeEngine(config.engine, config.fake, sink, progress)
        from .engine import Engine

        return Engine(config.engine, sink, progress, server.lose_rank, server.peers)

    server = WorkerServer(config, build_engine, Security.from_secret(os.environ.get(SECRET_VARIABLE)))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _frame: server.stop(f"stopped by {signal.Signals(signum).name}"))
    return server.run()


def die_with_parent(parent: int) -> None:
    """SIGKILL for us when the thread that started us ends, even by SIGKILL itself; at once where `parent` is
    gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

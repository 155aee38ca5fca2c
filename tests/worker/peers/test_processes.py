"""Two worker processes as they run in a cluster: what one computed, the other fetches, encrypted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from documents import DOCUMENT, documents
from live_worker import Peer as Line

from decodefleet.worker.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, WorkerConfig
from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.protocol import (
    Attach,
    Peer,
    Ready,
    Register,
    Submit,
    TokenDelta,
    ToRouter,
    ToScheduler,
    ToSupervisor,
)
from decodefleet.worker.rank import SECRET_VARIABLE
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.transport import Security, bind, connect

SECRET = "hush"


class Process:
    """A rank process, with its supervisor, scheduler and router in this one."""

    def __init__(self, context: zmq.Context[Any], model: Path, folder: Path, name: str) -> None:
        security = Security.from_secret(SECRET)
        supervisor, supervised_at = bind(context, zmq.ROUTER, "tcp://127.0.0.1:0", security)
        scheduler, scheduled_at = bind(context, zmq.ROUTER, "tcp://127.0.0.1:0", security)
        config = WorkerConfig(
            worker_id=name,
            engine=EngineConfig(
                model=ModelConfig(folder=model, served_name="tiny"),
                cache=CacheConfig(num_gpu_blocks_override=64, kv_restore="always"),
                runner=RunnerConfig(device="cpu", threads=1),
            ),
            supervisor=supervised_at,
        )
        file = folder / f"{name}.json"
        file.write_text(config.model_dump_json())
        command = [sys.executable, "-m", "decodefleet.worker.rank", "--config", str(file)]
        self.process = subprocess.Popen(
            [*command, "--parent", str(os.getpid())], env={**os.environ, SECRET_VARIABLE: SECRET}
        )
        lines = Line(supervisor, ToSupervisor), Line(scheduler, ToScheduler)
        self._supervisor, self._scheduler = lines
        self._ready = self._supervisor.wait(Ready)
        self._supervisor.send(Attach(endpoint=scheduled_at, epoch=1))
        self.peer_endpoint = self._scheduler.wait(Register).peer_endpoint
        self._router = Line(connect(context, self._ready.endpoint, security, "router"), ToRouter)

    def peer(self, blocks: int) -> Peer:
        return Peer(
            worker_id=self._ready.worker_id,
            incarnation=self._ready.incarnation,
            endpoint=self.peer_endpoint,
            blocks=blocks,
        )

    def ask(self, name: str, prompt: list[int], peer: Peer | None = None) -> list[TokenDelta]:
        params = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True)
        self._router.send(
            Submit(
                request_id=name,
                incarnation=self._ready.incarnation,
                epoch=1,
                prompt=pack_tokens(prompt),
                params=params,
                peer=peer,
            )
        )
        return self._router.deltas(name)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for line in (self._supervisor, self._scheduler, self._router):
            line.socket.close()


@contextmanager
def processes(model: Path, folder: Path) -> Iterator[tuple[Process, Process]]:
    context: zmq.Context[Any] = zmq.Context()
    first, second = (Process(context, model, folder, name) for name in ("first", "second"))
    yield first, second
    first.close()
    second.close()
    context.term()


def text(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


@pytest.mark.parametrize("frozen", [False, True], ids=["in health", "frozen"])
def test_a_prefix_goes_from_process_to_process(tiny_llama: Path, tmp_path: Path, frozen: bool) -> None:
    (prompt,) = documents(1)
    with processes(tiny_llama, tmp_path) as (owner, other):
        wanted = owner.ask("a", prompt)
        if frozen:
            owner.process.send_signal(signal.SIGSTOP)
        found = other.ask("b", prompt, owner.peer(DOCUMENT // 16))
        assert text(found) == text(wanted)
        assert found[0].cached_tokens == (0 if frozen else DOCUMENT - 16)

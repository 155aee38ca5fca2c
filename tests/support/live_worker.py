"""A whole worker in a thread, with the fake engine, and the peers that speak to it over real sockets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from decodefleet.worker.config import (
    BatchConfig,
    CacheConfig,
    EngineConfig,
    FakeConfig,
    ModelConfig,
    WorkerConfig,
)
from decodefleet.worker.engine_api import EngineLike
from decodefleet.worker.fake import FakeEngine
from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.protocol import (
    Heartbeat,
    Ready,
    StepOutput,
    Submit,
    TokenDelta,
    ToRouter,
    ToScheduler,
    ToSupervisor,
)
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.server import WorkerServer
from decodefleet.worker.transport import Codec, Security, bind, connect

PATIENCE_MS = 20_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 100_000,
    "eos_token_id": 2,
}

M = TypeVar("M")


class Peer:
    """A socket with a codec; receives what one test step waits for."""

    def __init__(self, socket: Any, union: Any) -> None:
        self.socket = socket
        self.worker = b""
        self._codec: Codec[Any] = Codec(union)

    def send(self, message: msgspec.Struct) -> None:
        frame = self._codec.encode(message)
        self.socket.send_multipart([self.worker, frame] if self.worker else [frame])

    def next(self) -> Any:
        assert self.socket.poll(PATIENCE_MS), "nothing came"
        frames = self.socket.recv_multipart()
        if len(frames) == 2:
            self.worker = frames[0]
        return self._codec.decode(frames[-1])

    def wait(self, kind: type[M], accept: Callable[[M], bool] = lambda _: True) -> M:
        """The first message of a kind that is acceptable; others are passed over."""
        give_up = time.monotonic() + PATIENCE_MS / 1000
        message = None
        while time.monotonic() < give_up:
            message = self.next()
            if isinstance(message, kind) and accept(message):
                return message
        raise AssertionError(f"no such {kind.__name__} came; the last message was {message}")

    def deltas(self, request_id: str, sequences: int = 1) -> list[TokenDelta]:
        """Everything of one request, to the end of its sequences."""
        found: list[TokenDelta] = []
        while sum(delta.finish_reason is not None for delta in found) < sequences:
            output = self.wait(StepOutput)
            found += [delta for delta in output.deltas if delta.request_id == request_id]
        return found


class Worker:
    """A WorkerServer in its thread, its supervisor, its scheduler, and as many routers as wanted."""

    def __init__(
        self,
        folder: Path,
        engine: Callable[..., EngineLike] = FakeEngine,
        secret: str | None = None,
        fake: FakeConfig | None = None,
        batch: BatchConfig | None = None,
        scheduler_timeout_s: float = 3600,
    ) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        self.security = Security.from_secret(secret)
        self.context: zmq.Context[Any] = zmq.Context()
        supervisor, supervisor_endpoint = bind(self.context, zmq.ROUTER, "tcp://127.0.0.1:0", self.security)
        scheduler, self.scheduler_endpoint = bind(
            self.context, zmq.ROUTER, "tcp://127.0.0.1:0", self.security
        )
        self.supervisor = Peer(supervisor, ToSupervisor)
        self.scheduler = Peer(scheduler, ToScheduler)
        config = WorkerConfig(
            worker_id="w0",
            engine=EngineConfig(
                model=ModelConfig(folder=folder, served_name="tiny"),
                cache=CacheConfig(num_gpu_blocks_override=512),
                batch=batch or BatchConfig(),
            ),
            supervisor=supervisor_endpoint,
            heartbeat_s=0.02,
            scheduler_timeout_s=scheduler_timeout_s,
        )
        fake = fake or FakeConfig(step_base_s=0.001)
        self.server = WorkerServer(
            config, lambda sink, progress: engine(config.engine, fake, sink, progress), self.security
        )
        self.peers: list[Peer] = []
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def ready(self) -> Ready:
        return self.supervisor.wait(Ready)

    def router(self, name: str = "r0", security: Security | None = None, endpoint: str | None = None) -> Peer:
        """endpoint: another way to the worker."""
        socket = connect(self.context, endpoint or self.server.endpoint, security or self.security, name)
        self.peers.append(Peer(socket, ToRouter))
        return self.peers[-1]

    def submit(self, request_id: str, prompt: int = 40, **fields: Any) -> Submit:
        params = fields.pop("params", SamplingParams(temperature=0, max_tokens=5))
        fields = {"incarnation": self.server.incarnation, "epoch": 1} | fields
        return Submit(
            request_id=request_id, prompt=pack_tokens(range(3, 3 + prompt)), params=params, **fields
        )

    def wait_idle(self, **finished: int) -> Heartbeat:
        """Until so many sequences have ended, nothing runs, and every block is back."""

        def idle(beat: Heartbeat) -> bool:
            stats = beat.stats
            back = stats.free_blocks + stats.cached_blocks == stats.total_blocks
            return stats.finished == finished and stats.running == stats.waiting == 0 and back

        return self.supervisor.wait(Heartbeat, idle)

    def end(self) -> int | None:
        """Its exit code, once it has ended by itself."""
        self._thread.join(PATIENCE_MS / 1000)
        assert not self._thread.is_alive()
        return self.exit_code

    def close(self) -> None:
        self.server.stop()
        self._thread.join(PATIENCE_MS / 1000)
        self.context.destroy(linger=0)

    def _run(self) -> None:
        self.exit_code = self.server.run()


LONG = SamplingParams(temperature=0, max_tokens=50_000, ignore_eos=True)

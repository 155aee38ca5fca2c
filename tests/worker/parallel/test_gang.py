"""Followers as processes: they come, they fail, they are killed, and nothing of them is left."""

from __future__ import annotations

import queue
import signal
from pathlib import Path

import psutil
import pytest

from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.config import EngineConfig, ModelConfig, RunnerConfig
from decodefleet.worker.parallel.gang import Gang


def config_of(folder: Path) -> EngineConfig:
    runner = RunnerConfig(device="cpu", threads=1, tensor_parallel_size=2)
    return EngineConfig(model=ModelConfig(folder=folder, served_name="tiny"), runner=runner)


def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    gang = Gang(config_of(tmp_path), max_len=64)
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        gang.await_loaded()
    gang.close()
    assert not any(psutil.pid_exists(pid) for pid in gang.pids)


def test_a_killed_rank_is_reported_and_not_waited_for(tiny_llama: Path) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    gang = Gang(config_of(tiny_llama), max_len=64, on_loss=lost.put)
    (pid,) = gang.pids
    # it waits for rank 0, which does not come
    psutil.Process(pid).send_signal(signal.SIGKILL)
    assert lost.get(timeout=20) == "rank 1 of the model ended with SIGKILL"
    with pytest.raises(ModelError, match="ended with SIGKILL while it was loading"):
        gang.await_loaded()
    gang.close()
    assert not psutil.pid_exists(pid)

"""Models on several ranks behind HTTP: the same answers, and what a client sees when a rank is killed."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from tiny_families import SHAPE, write_random
from transformers import LlamaConfig

from decodefleet.worker.llm import LLM, SamplingParams

STREAMS = 16
PROMPT = "The capital of France is"


class Stream(threading.Thread):
    """A completion that goes on until it fails or is left. pieces: how often something came."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__()
        self.pieces = 0
        self.error: dict[str, Any] | None = None
        self.left = False
        self._request = {
            "model": "tiny",
            "prompt": f"{number} {PROMPT}",
            "max_tokens": 1900,
            "stream": True,
            "ignore_eos": True,
        }
        self._url = url
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._request, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.pieces += 1
                    self.error = json.loads(line.removeprefix("data: ")).get("error")
                if self.left:
                    return


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that takes little time, with a real tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(**{**SHAPE, "vocab_size": 49152, "max_position_embeddings": 2048})
    write_random(folder, config, torch.bfloat16)
    for file in smollm2.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def test_a_killed_rank_ends_its_streams_only_and_comes_back(
    make_brief_stack: Callable[..., Any], folder: Path
) -> None:
    runner = {"tensor_parallel_size": 2, "device": "cpu", "threads": 2}
    stack = make_brief_stack(workers=2, folder=folder, fake=False, blocks=2200, runner=runner)
    streams = [Stream(stack.url, number) for number in range(STREAMS)]
    wait_for(lambda: all(stream.pieces > 2 for stream in streams))
    hit, other = stack.supervisors
    first, untouched = hit.ready.incarnation, other.ready.incarnation
    (rank,) = followers(hit.pid)
    rank.kill()
    wait_for(lambda: any(stream.error for stream in streams))
    wait_for(lambda: hit.ready is not None and hit.ready.incarnation != first)
    failed = [stream for stream in streams if stream.error]
    assert all(stream.error["code"] in ("worker_failed", "worker_lost") for stream in failed)
    assert 0 < len(failed) < STREAMS
    going_on = [stream for stream in streams if not stream.error]
    pieces = [stream.pieces for stream in going_on]
    wait_for(lambda: all(s.pieces > n or not s.is_alive() for s, n in zip(going_on, pieces, strict=True)))
    assert other.ready.incarnation == untouched
    with stack.http() as http:
        assert http.get("/ready").status_code == 200
    for stream in streams:
        stream.left = True
        stream.join()
    ranks = [*followers(hit.pid), *followers(other.pid)]
    assert len(ranks) == 2
    assert rank not in ranks
    for supervisor in stack.supervisors:
        stack.call(supervisor.stop)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


@pytest.mark.parametrize(("model", "ranks"), [("smollm2", 3), ("gemma3_270m", 2)])
def test_real_models_say_on_several_ranks_what_they_say_on_one(
    request: pytest.FixtureRequest, model: str, ranks: int
) -> None:
    """A rank for each KV head of the first; both ranks with the one KV head of the second."""
    folder = request.getfixturevalue(model)
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=1)
    texts: dict[int, list[Any]] = {}
    for size in (1, ranks):
        llm = LLM(str(folder), max_model_len=256, num_gpu_blocks_override=160, tensor_parallel_size=size)
        outputs = llm.generate([PROMPT, "One, two, three,"], params, progress=False)
        texts[size] = [output.outputs[0] for output in outputs]
        llm.close()
    for one, several in zip(texts[1], texts[ranks], strict=True):
        assert agree(one, several)


def agree(one: Any, several: Any) -> bool:
    """Equal up to a token where the two best were as good as equal."""
    for ours, theirs in zip(several.logprobs, one.logprobs, strict=True):
        if ours.token != theirs.token:
            return bool(abs(ours.logprob - theirs.logprob) < 0.1)
        assert abs(ours.logprob - theirs.logprob) < 0.15
    return True


def followers(pid: int | None) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [child for child in children if "decodefleet.worker.follower" in child.cmdline()]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)

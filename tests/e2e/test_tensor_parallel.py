"""Models on several ranks behind HTTP: the same answers, and what is left when a rank is killed."""

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
from waiting import until

STREAMS = 16
# of log-probabilities in bf16: a tie between two tokens, and between one rank and several
TIE, TOLERANCE = 0.1, 0.15
PROMPT = "The capital of France is"


class Stream(threading.Thread):
    """A completion that goes on until it fails or is left.

    pieces: how often something came; pause: longest time between two of them.
    """

    def __init__(self, url: str, number: int) -> None:
        super().__init__()
        self.pieces = 0
        self.pause = 0.0
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
            before = None
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    self.pause = max(self.pause, now - before if before is not None else 0.0)
                    before = now
                    self.pieces += 1
                    self.error = json.loads(line.removeprefix("data: ")).get("error")
                if self.left:
                    return


class Readiness(threading.Thread):
    """Asks whether the server is ready, again and again."""

    def __init__(self, stack: Any) -> None:
        super().__init__()
        self._stack = stack
        self._ended = threading.Event()
        self._seen: set[int] = set()
        self.start()

    def run(self) -> None:
        with self._stack.http() as http:
            while not self._ended.wait(0.05):
                self._seen.add(http.get("/ready").status_code)

    def stop(self) -> set[int]:
        """What it was told."""
        self._ended.set()
        self.join()
        return self._seen


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that takes little time, with a real tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(**{**SHAPE, "vocab_size": 49152, "max_position_embeddings": 2048})
    write_random(folder, config, torch.bfloat16)
    for file in smollm2.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def test_a_killed_rank_takes_its_worker_along_and_nobody_else(
    make_brief_stack: Callable[..., Any], folder: Path
) -> None:
    runner = {"tensor_parallel_size": 2, "device": "cpu", "threads": 2}
    stack = make_brief_stack(workers=2, folder=folder, fake=False, blocks=2200, runner=runner)
    ready = Readiness(stack)
    streams = [Stream(stack.url, number) for number in range(STREAMS)]
    until(lambda: all(stream.pieces > 2 for stream in streams))
    hit, other = stack.supervisors
    first, untouched = hit.ready.incarnation, other.ready.incarnation
    (rank,) = followers(hit.pid)
    killed, times = time.monotonic(), {}
    rank.kill()
    until(lambda: first not in {member.key.incarnation for member in stack.scheduler.core.fleet})
    times["lost"] = time.monotonic() - killed
    # those of the worker that is gone go on elsewhere
    pieces = [stream.pieces for stream in streams]
    until(lambda: all(s.pieces > n or not s.is_alive() for s, n in zip(streams, pieces, strict=True)))
    times["longest pause of a stream"] = max(stream.pause for stream in streams)
    until(lambda: hit.ready is not None and hit.ready.incarnation != first)
    times["back"] = time.monotonic() - killed
    # with -s; machines under load are slow, so nothing is asserted of them
    print({what: f"{seconds:.2f} s" for what, seconds in times.items()})
    assert not any(stream.error for stream in streams)
    assert other.ready.incarnation == untouched
    for stream in streams:
        stream.left = True
        stream.join()
    assert ready.stop() == {200}, "one worker could answer all along"
    ranks = [*followers(hit.pid), *followers(other.pid)]
    assert len(ranks) == 2
    assert rank not in ranks
    for supervisor in stack.supervisors:
        stack.call(supervisor.stop)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


@pytest.mark.parametrize(("model", "ranks"), [("smollm2", 3), ("gemma3_270m", 2)])
def test_real_models_say_on_several_ranks_what_they_say_on_one(
    request: pytest.FixtureRequest, make_brief_stack: Callable[..., Any], model: str, ranks: int
) -> None:
    """A rank for each KV head of the first; both ranks with the one KV head of the second."""
    folder = request.getfixturevalue(model)
    said: dict[int, list[Any]] = {}
    for size in (1, ranks):
        runner = {"tensor_parallel_size": size, "device": "cpu"}
        stack = make_brief_stack(folder=folder, fake=False, blocks=160, max_model_len=256, runner=runner)
        with stack.client() as client:
            said[size] = [
                client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=24, temperature=0, logprobs=2
                ).choices[0]
                for prompt in (PROMPT, "One, two, three,", "The sea is")
            ]
    for one, several in zip(said[1], said[ranks], strict=True):
        assert agree(one.logprobs, several.logprobs)
        assert one.finish_reason == several.finish_reason


def agree(one: Any, several: Any) -> bool:
    """Equal tokens, up to one at which the two best are as good as equal on one rank."""
    pairs = zip(one.tokens, several.tokens, one.token_logprobs, several.token_logprobs, strict=False)
    for place, (ours, theirs, wanted, found) in enumerate(pairs):
        if ours != theirs:
            best, second = sorted(one.top_logprobs[place].values(), reverse=True)[:2]
            return bool(best - second < TIE)
        assert abs(wanted - found) < TOLERANCE
    return True


def followers(pid: int | None) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [child for child in children if "decodefleet.worker.follower" in child.cmdline()]

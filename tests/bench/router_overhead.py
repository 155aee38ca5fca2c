"""What a router costs, beside SGLang's and vLLM's: CPU and latency per request and per streamed token.

    python tests/bench/router_overhead.py --rounds 3 --output tests/bench/results/NAME.json \
        --router 'sglang-router 0.3.2|VENV/bin/sglang-router launch --host 127.0.0.1 --port {port}
                  --worker-urls {backends} --policy cache_aware --prometheus-port {spare}' \
        --router 'vllm-router 0.1.17|VENV/bin/vllm-router --host 127.0.0.1 --port {port}
                  --worker-urls {backends} --policy cache_aware --prometheus-port {spare}'

All stand in front of two backends that give every stream a token each 20 ms and compute nothing: peers
before `fake_openai.py`, decodefleet (`own_router.py`) before its own fake workers, "direct" is the client at
a backend.
In each round each is started, loaded and stopped in turn. Loads are paced, so that all carry the same; CPU
time is that of the router's own process, without backends, less what it takes when idle. Per request: answers
of one token. Per token: answers of `--tokens`, less the request's part. decodefleet's router also tokenizes,
schedules and detokenizes, which the others leave to the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from decodefleet.cluster.bench.http import Exchange, HttpClient, Target
from decodefleet.cluster.bench.load import Dialect, Run, Sender, closed_loop
from decodefleet.cluster.bench.machine import provenance
from decodefleet.cluster.bench.summary import summarize
from decodefleet.cluster.bench.workload import Request, Segment

BENCH = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
START_LIMIT_S = 60.0
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
)


@dataclass(frozen=True)
class Setup:
    name: str
    command: str
    step_ms: float


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def prompt(request: Request) -> str:
    """About a hundred tokens, other ones for each request."""
    return " ".join(Random(request.segments[0].key).choices(WORDS, k=100))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def process(command: str) -> Iterator[subprocess.Popen[bytes]]:
    """In a group of its own, which is ended as a whole."""
    started = subprocess.Popen(
        shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield started
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


async def load(port: int, streams: int, requests: int, tokens: int) -> Run:
    client = HttpClient(Target.parse(f"http://127.0.0.1:{port}"), {}, timeout_s=120)
    dialect = Dialect("tiny", prompt, include_usage=False)
    failed: list[Exchange] = []

    def check(exchange: Exchange) -> None:
        if exchange.status != 200 or exchange.failure:
            failed.append(exchange)

    # ids differ between runs, so that no cache knows the prompts
    run = Random().random()
    work = [Request((Segment(f"{run}-{number}", 100),), tokens) for number in range(requests)]
    try:
        done = await closed_loop(Sender(client, dialect, check), work, streams)
    finally:
        await client.close()
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0].status} {failed[0].body[:200]!r}")
    return done


async def until_ready(port: int) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while True:
        try:
            await load(port, 1, 1, 1)
            return
        except (RuntimeError, OSError):
            if time.monotonic() > limit:
                raise
            await asyncio.sleep(0.2)


def measure(port: int, pid: int, streams: int, rounds_of_requests: int, tokens: int) -> dict[str, float]:
    """One load of one-token answers and one of long ones; seconds of CPU less those of idling as long."""
    before = cpu_s(pid)
    time.sleep(2.0)
    idle = (cpu_s(pid) - before) / 2.0

    def busy(requests: int, length: int) -> tuple[Run, float]:
        before = cpu_s(pid)
        run = asyncio.run(load(port, streams, requests, length))
        return run, max(0.0, cpu_s(pid) - before - idle * run.duration_s)

    short_requests, long_requests = max(100, 20 * streams), max(3, rounds_of_requests * streams)
    _, short_cpu = busy(short_requests, 1)
    run, long_cpu = busy(long_requests, tokens)
    per_request = short_cpu / short_requests
    per_token = (long_cpu / long_requests - per_request) / (tokens - 1)
    summary, _ = summarize("long", run, [100] * long_requests)
    assert summary.ttft is not None
    assert summary.itl is not None
    return {
        "request_cpu_us": per_request * 1e6,
        "token_cpu_us": per_token * 1e6,
        "ttft_p50_ms": summary.ttft.p50,
        "ttft_p99_ms": summary.ttft.p99,
        "itl_p50_ms": summary.itl.p50,
        "itl_p99_ms": summary.itl.p99,
        "tokens_per_s": long_requests * tokens / run.duration_s,
        "client_cpu": run.client_cpu_s / run.duration_s,
    }


def one_round(setup: Setup, streams: list[int], tokens: int) -> dict[str, dict[str, float]]:
    ports = [free_port() for _ in range(2)]
    backend = f"{sys.executable} {BENCH / 'fake_openai.py'} --step-ms {setup.step_ms} --port"
    urls = " ".join(f"http://127.0.0.1:{port}" for port in ports)
    port = free_port()
    command = setup.command.format(port=port, backends=urls, spare=free_port())
    with process(f"{backend} {ports[0]}"), process(f"{backend} {ports[1]}"), process(command) as router:
        asyncio.run(until_ready(port))
        return {str(count): measure(port, router.pid, count, 3, tokens) for count in streams}


def medians(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        streams: {
            figure: round(statistics.median(each[streams][figure] for each in rounds), 2)
            for figure in figures
        }
        for streams, figures in rounds[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--router", action="append", default=[], help="NAME|COMMAND of a peer")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    step, python = options.step_ms, sys.executable
    setups = [
        Setup("direct", f"{python} {BENCH / 'fake_openai.py'} --step-ms {step} --port {{port}}", step),
        Setup("decodefleet", f"{python} {BENCH / 'own_router.py'} --step-ms {step} --port {{port}}", step),
        *(Setup(*each.split("|", 1), step) for each in options.router),
    ]
    results: dict[str, list[Any]] = {setup.name: [] for setup in setups}
    for number in range(options.rounds):
        for setup in setups:
            results[setup.name].append(one_round(setup, options.streams, options.tokens))
            print(f"round {number + 1}: {setup.name} done", file=sys.stderr, flush=True)
    summary = {name: medians(rounds) for name, rounds in results.items()}
    print(json.dumps(summary, indent=1))
    if options.output:
        document = {"machine": provenance(), "medians": summary, "rounds": results}
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Serving speed beside a peer's: the same loads through `decodefleet bench serve`, alternating in one run.

    python tests/bench/against_peers.py --rounds 3 --output tests/bench/results/NAME.json \
        --server 'decodefleet|http://127.0.0.1:8000|decodefleet serve --port 8000' \
        --server 'llama.cpp|http://127.0.0.1:8081|llama-server -m MODEL.gguf --port 8081|--connection-close'

Each server is NAME|URL|COMMAND[|BENCH OPTIONS]; those options replace the load's. In each round every server
is started, loaded and stopped in turn, so that they share the machine's moods but not its cores; ratios are
taken within a round. The memory's read bandwidth is measured before each round.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from decodefleet.kernels.cpu.arena import Arena

# shows how work is shared out among workers
SHARED = "shared prefixes"
LOADS = {
    "1 stream": ("--concurrency", "1", "--requests", "6"),
    "8 streams": ("--concurrency", "8", "--requests", "32"),
    "32 streams": ("--concurrency", "32", "--requests", "96"),
    "prefill 2048": ("--concurrency", "1", "--requests", "5", "--input-len", "2048", "--output-len", "1"),
    SHARED: (
        *("--concurrency", "8", "--requests", "256", "--prefix-groups", "8", "--prefix-len", "1024"),
        *("--input-len", "1088", "--output-len", "32"),
    ),
}
# figure: where in a run's summary
FIGURES: dict[str, tuple[str, ...]] = {
    "output tok/s": ("output_tokens_per_s",),
    "input tok/s": ("input_tokens_per_s",),
    "TTFT p50 ms": ("ttft", "p50"),
    "TTFT p99 ms": ("ttft", "p99"),
    "TPOT p50 ms": ("tpot", "p50"),
    "TPOT p99 ms": ("tpot", "p99"),
    "ITL p99 ms": ("itl", "p99"),
    "cached prompt tokens": ("cached_tokens",),
    "client's share of a core": ("client_cpu",),
}
START_LIMIT_S = 300
STOP_LIMIT_S = 60


@dataclass(frozen=True)
class Server:
    name: str
    url: str
    command: list[str]
    options: list[str]

    @classmethod
    def parse(cls, text: str) -> Server:
        name, url, command, *options = text.split("|")
        return cls(name, url, shlex.split(command), shlex.split(options[0]) if options else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--server", action="append", type=Server.parse, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--load", action="append", choices=list(LOADS), help="default: all but shared prefixes"
    )
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    loads = options.load or [load for load in LOADS if load != SHARED]
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        order = options.server if number % 2 == 0 else options.server[::-1]
        result: dict[str, Any] = {"read_gb_s": read_bandwidth(), "servers": {}}
        for server in order:
            result["servers"][server.name] = measure(server, loads)
        rounds.append(result)
        options.output.write_text(json.dumps({"command": sys.argv, "rounds": rounds}, indent=1) + "\n")
    table = render([server.name for server in options.server], loads, rounds)
    options.output.with_suffix(".md").write_text(table)
    print(table)


def measure(server: Server, loads: list[str]) -> dict[str, Any]:
    process = subprocess.Popen(
        server.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_until_ready(server, process)
        return {load: bench(server, load) for load in loads}
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    """Ready means: a token came out."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{server.name} ended with {process.returncode}: {shlex.join(server.command)}")
        try:
            models = httpx.get(f"{server.url}/v1/models", timeout=5).json()["data"]
            body = {"model": models[0]["id"], "prompt": "Hello", "max_tokens": 1}
            if httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200:
                return
        except (httpx.HTTPError, LookupError, ValueError):
            pass
        time.sleep(0.5)
    raise SystemExit(f"{server.name} did not answer within {START_LIMIT_S} s")


def bench(server: Server, load: str) -> dict[str, Any]:
    print(f"{time.strftime('%H:%M:%S')} {server.name}: {load}", file=sys.stderr, flush=True)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [Path(sys.executable).parent / "decodefleet", "bench", "serve", "--url", server.url]
        subprocess.run(
            [*command, *given(load, server.options), *server.options, "--output", file.name],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (run,) = json.loads(Path(file.name).read_text())["runs"]
        if run["succeeded"] != run["requests"]:
            print(f"{server.name}: {run['errors']}", file=sys.stderr)
        return {name: value for name, value in run.items() if name != "per_request"}


def given(load: str, options: list[str]) -> list[str]:
    """The load's options but for those that a server has its own of."""
    flags = LOADS[load][::2]
    pairs = [pair for pair in zip(flags, LOADS[load][1::2], strict=True) if pair[0] not in options]
    return [word for pair in pairs for word in pair]


def read_bandwidth() -> float:
    """GB/s of reading 1 GiB in huge pages, best of one and two threads."""
    data = Arena().empty((1 << 27,), torch.int64).fill_(1)
    best = 0.0
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        for _ in range(5):
            began = time.perf_counter()
            data.sum()
            best = max(best, data.numel() * 8 / (time.perf_counter() - began) / 1e9)
    torch.set_num_threads(threads)
    return best


def dig(summary: dict[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = summary
    for key in path:
        value = None if value is None else value.get(key)
    return None if value is None else float(value)


def ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / max(b, 1e-9) for a, b in zip(ours, theirs, strict=True))


def render(names: list[str], loads: list[str], rounds: list[dict[str, Any]]) -> str:
    """Median [least .. most] over the rounds; ratios are the first server's to a peer's within a round."""
    lines = [
        "| load | figure | " + " | ".join(names) + " | median ratio |",
        "|---|---|" + "---|" * (len(names) + 1),
    ]
    for load in loads:
        for figure, path in FIGURES.items():
            found = {name: [dig(r["servers"][name][load], path) for r in rounds] for name in names}
            values = {name: [v for v in series if v is not None] for name, series in found.items()}
            if any(len(series) < len(rounds) for series in values.values()):
                continue
            cells = [f"{statistics.median(v):.4g} [{min(v):.4g} .. {max(v):.4g}]" for v in values.values()]
            ratios = [f"{ratio(values[names[0]], values[name]):.2f} × {name}" for name in names[1:]]
            lines.append(f"| {load} | {figure} | {' | '.join(cells)} | {', '.join(ratios)} |")
    bandwidth = [r["read_gb_s"] for r in rounds]
    lines.append(f"\nRead bandwidth before the rounds: {', '.join(f'{b:.1f}' for b in bandwidth)} GB/s.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

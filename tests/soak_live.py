"""A real server under clients that come and go: nothing leaks, and one request always has one text.

    python tests/soak_live.py [--minutes 3] [--clients 16] [--seed N] [--model smollm2-135m]

Starts `decodefleet serve` with a main pool that is much too small, memory and disk below it. Clients ask
greedily for beginnings of a few texts, alone or n at a time, and a third of them leave before the end. Fails
where an answer differs from the first one to the same question, a request fails, or blocks, sequences or
reservations have not come back in the end. Prints the seed and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from decodefleet.cluster.processes import free_ports

COMMAND = [sys.executable, "-c", "from decodefleet.cluster.cli import main; main()", "serve"]
POOL = ["--num-gpu-blocks-override", "160", "--max-model-len", "1024", "--max-num-seqs", "8"]
BELOW = [
    "--cpu-kv-gib",
    "0.05",
    "--nvme-kv-gib",
    "0.1",
    "--kv-restore",
    "always",
    "--eviction-policy",
    "cost",
]
SETTLE_S = 60


@dataclass
class Outcome:
    texts: dict[tuple[str, int], str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def make_question(rng: random.Random) -> tuple[str, int]:
    """A prompt and how many tokens to answer with; few enough that all come again."""
    subject = rng.choice(["rivers", "engines", "orchards", "letters", "bridges", "clocks"])
    prompt = " ".join(
        f"Chapter {i} is about {subject} and {i * i} more." for i in range(rng.choice([2, 9, 30, 55]))
    )
    return prompt, rng.choice([4, 16, 40])


async def client(http: httpx.AsyncClient, model: str, rng: random.Random, until: float, out: Outcome) -> None:
    while time.monotonic() < until:
        prompt, tokens = make_question(rng)
        n = rng.choice([1, 1, 1, 2])
        leaves_after = rng.choice([0.0, 0.05, 0.3, 1.0, 3.0]) if rng.random() < 1 / 3 else None
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "n": n,
            "temperature": 0,
            "ignore_eos": True,
            "stream": rng.random() < 0.5,
        }
        try:
            async with asyncio.timeout(leaves_after):
                answer = await http.post("/v1/completions", json=body)
        except TimeoutError:
            out.counts["left"] += 1
            continue
        if answer.status_code != 200:
            out.faults.append(f"{answer.status_code}: {answer.text[:200]}")
            continue
        out.counts["answered"] += 1
        for text in texts_of(answer.text, n) if body["stream"] else texts_of_json(answer.json()):
            if text != out.texts.setdefault((prompt, tokens), text):
                out.faults.append(f"{tokens} tokens after {prompt[:60]!r}: two texts")


def texts_of(events: str, n: int) -> list[str]:
    texts = [""] * n
    for line in events.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
    return texts


def texts_of_json(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """Sums over labels."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return dict(sums)


def residue(seen: dict[str, float]) -> dict[str, float]:
    """What is not back yet."""
    used = (
        seen["decodefleet_kv_blocks"]
        - seen["decodefleet_kv_blocks_free"]
        - seen["decodefleet_kv_blocks_cached"]
    )
    names = ("sequences_running", "sequences_waiting", "scheduler_reservations", "scheduler_queue_length")
    left = {name: seen[f"decodefleet_{name}"] for name in names} | {"blocks in use": used}
    return {name: value for name, value in left.items() if value}


async def soak(url: str, options: argparse.Namespace, server: subprocess.Popen[bytes]) -> Outcome:
    out = Outcome()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300, trust_env=False) as http:
        while not await ready(http):
            if server.poll() is not None:
                raise SystemExit("the server ended before it was ready")
            await asyncio.sleep(0.2)
        until = time.monotonic() + 60 * options.minutes
        rngs = [random.Random(f"{options.seed} {number}") for number in range(options.clients)]
        await asyncio.gather(*(client(http, options.model, rng, until, out) for rng in rngs))
        left: dict[str, float] = {}
        for _ in range(SETTLE_S * 5):
            left = residue(await metrics(http))
            if not left:
                break
            await asyncio.sleep(0.2)
        out.faults += [f"left over: {name} {value:g}" for name, value in left.items()]
        seen = await metrics(http)
        for name in ("preemptions", "evicted_blocks", "prefix_cache_hits"):
            out.counts[name] = int(seen[f"decodefleet_{name}_total"])
    return out


async def ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    port = free_ports(1)[0]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        disk = ["--nvme-kv-path", str(Path(folder, "kv"))]
        with log.open("wb") as output:
            server = subprocess.Popen(
                [*COMMAND, options.model, "--port", str(port), *POOL, *BELOW, *disk],
                stdout=output,
                stderr=output,
                env=os.environ | {"NO_COLOR": "1"},
            )
        try:
            out = asyncio.run(soak(f"http://127.0.0.1:{port}", options, server))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(120)
        if out.faults:
            print(log.read_text(errors="replace")[-4000:])
    print(
        json.dumps(
            {"seed": options.seed, **out.counts, "questions": len(out.texts), "faults": out.faults[:20]}
        )
    )
    sys.exit(bool(out.faults))


if __name__ == "__main__":
    main()

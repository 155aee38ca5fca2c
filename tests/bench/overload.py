"""A server under five times the load it can take: those accepted are served as at capacity, others told so.

    PYTHONPATH=tests/support python tests/bench/overload.py [--seconds 60] [--times 5] [--seed 1]

Starts `decodefleet serve` with two fake workers whose steps take time, and offers it Poisson load: at its
capacity, at `times` that, and at its capacity again; then one tenant alone, and the same beside another with
ten times its load. Prints one line of JSON: seconds, MiB, and shares.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
from chaos_cluster import fleet_metrics, residue
from offered_load import Offer, Reply, first_times, offer_all, poisson, quantile
from served import Served

STEP_S = 0.1
SEATS = 48
WORKERS = 2
TOKENS = 32
QUEUE = 16
BODY = {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
# requests per second that all seats together finish
CAPACITY = WORKERS * SEATS / (TOKENS * STEP_S)
SAMPLE_S = 1.0


class Memory:
    """Resident MiB of every process of a server, once a second."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._ended = threading.Event()
        self._samples: dict[int, list[float]] = {}
        self._names: dict[int, str] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def growth(self) -> dict[str, float]:
        """Of the three that grew most, from the second fifth of the time to the last."""
        grown = {}
        for pid, samples in self._samples.items():
            fifth = len(samples) // 5
            if fifth:
                early, late = samples[fifth : 2 * fifth], samples[-fifth:]
                grown[f"{self._names[pid]} {pid}"] = round(sum(late) / fifth - sum(early) / fifth, 1)
        return dict(sorted(grown.items(), key=lambda item: -item[1])[:3])

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            for role, processes in self._served.census().items():
                for process in processes:
                    try:
                        resident = process.memory_info().rss / 2**20
                    except psutil.NoSuchProcess:
                        continue
                    self._names[process.pid] = role
                    self._samples.setdefault(process.pid, []).append(resident)


def summary(replies: list[Reply]) -> dict[str, Any]:
    accepted, refused = first_times(replies, 200), first_times(replies, 429)
    return {
        "offered": len(replies),
        "status": dict(Counter(reply.status for reply in replies)),
        "broken": sum(reply.status == 200 and not reply.whole for reply in replies),
        "ttft_p50": round(quantile(accepted, 0.5), 3),
        "ttft_p95": round(quantile(accepted, 0.95), 3),
        "ttft_p99": round(quantile(accepted, 0.99), 3),
        "refused_p50": round(quantile(refused, 0.5), 4),
        "refused_p99": round(quantile(refused, 0.99), 4),
        "told_when": sum(reply.retry_after for reply in replies),
    }


def measure(served: Served, options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)

    def run(*offers: list[Offer]) -> list[Reply]:
        replies = asyncio.run(offer_all(served.url, [offer for part in offers for offer in part]))
        while left := residue(fleet_metrics(served.url)):
            print(f"waiting for {left}", flush=True)
            time.sleep(0.5)
        return replies

    def load(times: float, tenant: str = "") -> list[Offer]:
        return poisson(rng, times * CAPACITY, options.seconds, BODY, tenant)

    result: dict[str, Any] = {"capacity_rps": CAPACITY}
    run(poisson(rng, CAPACITY, 5, BODY))
    result["at_capacity"] = summary(run(load(1.0)))
    with Memory(served) as memory:
        result["overload"] = summary(run(load(options.times)))
    result["grown_mib"] = memory.growth()
    result["at_capacity_again"] = summary(run(load(1.0)))
    result["small_alone"] = summary(run(load(0.3, "small")))
    replies = run(load(0.3, "small"), load(3.0, "large"))
    for tenant in ("small", "large"):
        result[f"{tenant}_beside"] = summary([r for r in replies if r.offer.tenant == tenant])
    result["ratio_ttft_p99_overload"] = ratio(result, "overload", "at_capacity", "ttft_p99")
    result["ratio_ttft_p95_tenant"] = ratio(result, "small_beside", "small_alone", "ttft_p95")
    return result


def ratio(result: dict[str, Any], part: str, whole: str, name: str) -> float:
    return round(float(result[part][name]) / float(result[whole][name]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(
            Path(folder) / "log",
            *("smollm2-135m", "--served-model-name", "tiny", "--workers", str(WORKERS), "--fake"),
            *("--fake-step-base-s", str(STEP_S), "--max-num-seqs", str(SEATS), "--max-queue", str(QUEUE)),
        )
        try:
            served.wait_ready()
            print(json.dumps(measure(served, options)), flush=True)
        except httpx.HTTPError as error:
            raise SystemExit(f"{error!r}\n{served.log.read_text()}") from error
        finally:
            served.stop()


if __name__ == "__main__":
    main()

"""A server under five times the load it can take: those accepted are served as at capacity, others told so.

    PYTHONPATH=tests/support python tests/bench/overload.py [--seconds 60] [--times 5] [--seed 1]

Starts `decodefleet serve` with two fake workers whose steps take time, and offers it Poisson load: at its
capacity, at `times` that, and at its capacity again; then a small tenant alone, and the same beside a large
one, for two sizes of both. Capacity is what the seats finish if none is ever empty: a little more than can be
served, for a seat that comes free stays empty for the rest of a step at least.

Loads that are compared have arrivals in common: those at capacity are the same both times and are among those
of the overload, and a small tenant's are the same alone and beside the other. Each part begins with ten
seconds at no more than capacity that do not count, so that no part is measured while the seats fill. Prints
one line of JSON: seconds, MiB, and shares.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
from chaos_cluster import fleet_metrics, residue
from offered_load import Offer, Reply, first_times, offer_all, poisson
from quantiles import quantile
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
# before what counts
WARM_S = 10.0
# loads of the small tenant and of the large one, in capacities
PAIRS = ((0.1, 1.0), (0.3, 3.0))


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


def summary(replies: list[Reply], seconds: float) -> dict[str, Any]:
    """Of those that came after the first seconds. served: tokens of the accepted, of what the seats make."""
    replies = [reply for reply in replies if reply.offer.at_s >= WARM_S]
    accepted, refused = first_times(replies, 200), first_times(replies, 429)
    tokens = sum(reply.offer.body["max_tokens"] for reply in replies if reply.whole)
    return {
        "offered": len(replies),
        "status": dict(Counter(reply.status for reply in replies)),
        "broken": sum(reply.status == 200 and not reply.whole for reply in replies),
        "served": round(tokens / (seconds * CAPACITY * TOKENS), 3),
        "ttft_p50": round(quantile(accepted, 0.5), 3),
        "ttft_p95": round(quantile(accepted, 0.95), 3),
        "ttft_p99": round(quantile(accepted, 0.99), 3),
        "refused_p50": round(quantile(refused, 0.5), 4),
        "refused_p99": round(quantile(refused, 0.99), 4),
        "told_when": sum(reply.retry_after for reply in replies),
    }


class Bench:
    """One server, and loads that come again with the same number."""

    def __init__(self, served: Served, options: argparse.Namespace) -> None:
        self._served = served
        self._options = options

    def measure(self) -> dict[str, Any]:
        result: dict[str, Any] = {"capacity_rps": CAPACITY}
        steady = self._load(1, 1.0)
        result["at_capacity"] = self._summary(self._run(steady))
        surplus = self._load(2, self._options.times - 1.0, begin_s=WARM_S)
        with Memory(self._served) as memory:
            result["overload"] = self._summary(self._run(steady, surplus))
        result["grown_mib"] = memory.growth()
        result["at_capacity_again"] = self._summary(self._run(steady))
        result["ratio_ttft_p99_overload"] = ratio(result, "overload", "at_capacity", "ttft_p99")
        result["ratio_ttft_p99_again"] = ratio(result, "at_capacity_again", "at_capacity", "ttft_p99")
        result["tenants"] = [self._beside(*pair) for pair in PAIRS]
        return result

    def _beside(self, small: float, large: float) -> dict[str, Any]:
        own, other = self._load(3, small, tenant="small"), self._load(4, large, tenant="large")
        pair: dict[str, Any] = {"small": small, "large": large}
        pair["alone"] = self._summary(self._run(own))
        replies = self._run(own, other)
        for tenant in ("small", "large"):
            pair[f"{tenant}_beside"] = self._summary([r for r in replies if r.offer.tenant == tenant])
        pair["ratio_ttft_p95"] = ratio(pair, "small_beside", "alone", "ttft_p95")
        return pair

    def _load(self, number: int, times: float, tenant: str = "", begin_s: float = 0.0) -> list[Offer]:
        rng = random.Random(f"{self._options.seed} {number}")
        whole = poisson(rng, times * CAPACITY, WARM_S + self._options.seconds, BODY, tenant)
        return [offer for offer in whole if offer.at_s >= begin_s]

    def _run(self, *loads: list[Offer]) -> list[Reply]:
        replies = asyncio.run(offer_all(self._served.url, [offer for load in loads for offer in load]))
        while left := residue(fleet_metrics(self._served.url)):
            print(f"waiting for {left}", file=sys.stderr, flush=True)
            time.sleep(0.5)
        return replies

    def _summary(self, replies: list[Reply]) -> dict[str, Any]:
        found = summary(replies, self._options.seconds)
        print(found, file=sys.stderr, flush=True)
        return found


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
            print(json.dumps(Bench(served, options).measure()), flush=True)
        except httpx.HTTPError as error:
            raise SystemExit(f"{error!r}\n{served.log.read_text()}") from error
        finally:
            served.stop()


if __name__ == "__main__":
    main()

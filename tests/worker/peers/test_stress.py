"""Two workers that lend to each other while they compute, evict and preempt: delays at random wherever one
thread hands something to another, small pools, requests that go. Every text is the undisturbed one.

Short here; `PEER_ROUNDS=300 pytest tests/worker/peers/test_stress.py` is the long form.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from all_ways import GREEDY, PENALISED, SEEDED
from documents import cpu_tier
from engines import VOCAB, Outcome, make_engine, make_submit, run_all
from neighbours import Neighbour, neighbours

from decodefleet.worker.kv.tiers.copies import Copies
from decodefleet.worker.kv.tiers.transfers import Transfers
from decodefleet.worker.peers.borrower import Borrower
from decodefleet.worker.peers.lender import Lender
from decodefleet.worker.peers.links import PeerLinks
from decodefleet.worker.sampling_params import SamplingParams

ROUNDS = int(os.environ.get("PEER_ROUNDS", "4"))
FIRST = int(os.environ.get("PEER_FIRST", "0"))
REQUESTS = 12
# little more than the longest sequence needs
BLOCKS = 14
LONGEST_LAG_S = 0.004
SEAMS: list[tuple[type, str]] = [
    (Copies, "save"),
    (Copies, "load"),
    (Transfers, "start"),
    (Transfers, "poll"),
    (Borrower, "start"),
    (Lender, "_begin"),
    (Lender, "_slab"),
    (Lender, "_end"),
    (PeerLinks, "fetch"),
    (PeerLinks, "lend"),
    (PeerLinks, "_take"),
    (PeerLinks, "_settle"),
    (PeerLinks, "_answer"),
]
PARAMS: list[dict[str, Any]] = [GREEDY, SEEDED, PENALISED]
OPTIONS: list[dict[str, Any]] = [{}, {"async_scheduling": True}, {"kv_cache_dtype": "int8"}]


def lagging(method: Callable[..., Any], rng: random.Random, rate: float) -> Callable[..., Any]:
    def late(*args: Any, **kwargs: Any) -> Any:
        if rng.random() < rate:
            time.sleep(rng.random() * LONGEST_LAG_S)
        result = method(*args, **kwargs)
        if rng.random() < rate:
            time.sleep(rng.random() * LONGEST_LAG_S)
        return result

    return late


def prompts(rng: random.Random) -> list[list[int]]:
    """Of two families that share beginnings."""
    families = [[rng.randrange(3, VOCAB) for _ in range(130)] for _ in range(2)]
    return [
        family[:shared] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 24))]
        for family in families
        for shared in (33, 64, 97, 128)
    ]


Job = tuple[list[int], SamplingParams]


def undisturbed(folder: Path, jobs: list[Job], **options: Any) -> list[list[int]]:
    engine = make_engine(folder, blocks=64, prefix_caching=False, **options)
    texts = []
    for prompt, params in jobs:
        engine.submit(make_submit("alone", prompt, params))
        texts.append(run_all(engine, check=False)["alone", 0].tokens)
    engine.close()
    return texts


def run_round(
    pair: list[Neighbour], jobs: list[Job], rng: random.Random
) -> tuple[dict[int, Outcome], set[int]]:
    """All jobs, each at one of the two, who may have its beginning from the other; and which were aborted."""
    outcomes = {job: Outcome() for job in range(len(jobs))}
    gone: set[int] = set()
    left, place = [*range(len(jobs))], {}
    while left or any(each.engine.has_work() for each in pair):
        if left and rng.random() < 0.3:
            job = left.pop(0)
            here, there = rng.sample(pair, 2)
            prompt, params = jobs[job]
            here.submit(str(job), prompt, params, there.peer(len(prompt) // 16))
            place[job] = here
        if place and rng.random() < 0.01:
            job = rng.choice([*place])
            place[job].engine.abort(str(job), 0)
            gone.add(job)
        for each in pair:
            if each.engine.has_work() and rng.random() < 0.8:
                for delta in each.engine.step():
                    outcomes[int(delta.request_id)].tokens += delta.tokens
                each.engine.check_integrity()
    return outcomes, gone


def play(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """One round; returns how many blocks were fetched."""
    rng = random.Random(seed)
    options = rng.choice(OPTIONS)
    choice = prompts(rng)
    jobs = [
        (
            rng.choice(choice),
            SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True, **rng.choice(PARAMS)),
        )
        for _ in range(REQUESTS)
    ]
    wanted = undisturbed(folder, jobs, **options)
    rate = rng.choice([0.0, 0.1, 0.5])
    for owner, name in SEAMS:
        # of their own, since threads take turns as they like
        lags = random.Random(f"{seed} {owner.__name__} {name}")
        monkeypatch.setattr(owner, name, lagging(getattr(owner, name), lags, rate))
    tiers = rng.choice([{}, cpu_tier(6), cpu_tier(64)])
    with neighbours(folder, blocks=BLOCKS, tiers=tiers, **options) as pair:
        outcomes, gone = run_round(pair, jobs, rng)
        for job, text in enumerate(wanted):
            found = outcomes[job].tokens
            assert found == (text[: len(found)] if job in gone else text), f"round {seed}, request {job}"
        for each in pair:
            stats = each.engine.stats()
            assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
        return sum(each.fetched for each in pair)


def test_whatever_the_threads_do_the_text_is_the_same(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = 0
    for seed in range(FIRST, FIRST + ROUNDS):
        with monkeypatch.context() as patched:
            fetched += play(tiny_llama, seed, patched)
    assert fetched > 0

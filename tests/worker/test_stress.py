"""Anything at any time, in whole engines: submits, aborts, routers that go, forks of running sequences,
preemptions, damaged and failing tiers. Books are checked after every step, texts against undisturbed runs,
and in the end all blocks have come back.

Short here; `make soak` runs 100,000 operations and more (`SOAK_EXAMPLES`), with a seed that it prints.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from engines import VOCAB, RecordingSink, make_engine, make_submit, run_all
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from decodefleet.worker.engine import Engine
from decodefleet.worker.kv.tiers.slab_file import SlabForm
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.sequence import Sequence, State

EXAMPLES = int(os.environ.get("SOAK_EXAMPLES", "0"))
OPERATIONS = 60
# holds 1.2 of the longest sequences
BLOCKS = 10
LONGEST = 8 * 16
SLAB_BYTES = 16 * 2 * 32 * 2 * 2
FORKS = 1000

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "seed": 3},
    {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 5},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def make_prompts() -> list[list[int]]:
    """Three families, whose members share beginnings of several lengths."""
    rng = random.Random(0)
    families = [[rng.randrange(3, VOCAB) for _ in range(80)] for _ in range(3)]
    return [
        family[:shared] + [rng.randrange(3, VOCAB) for _ in range(own)]
        for family in families
        for shared, own in ((1, 3), (16, 9), (40, 20), (80, 1), (80, 24))
    ]


PROMPTS = make_prompts()
# of those there are: what is drawn must not depend on how far copying threads have come
WHICH = st.integers(0, 99)


class Undisturbed:
    """What each request says when it runs alone; asked once each."""

    def __init__(self, folder: Path) -> None:
        self._engine = make_engine(folder, blocks=64, prefix_caching=False)
        self._texts: dict[tuple[int, int, int], list[list[int]]] = {}

    def text(self, prompt: int, option: int, tokens: int, index: int) -> list[int]:
        key = prompt, option, tokens
        if key not in self._texts:
            params = make_params(option, tokens, n=3)
            self._engine.submit(make_submit("alone", PROMPTS[prompt], params))
            outcomes = run_all(self._engine, check=False)
            self._texts[key] = [outcomes["alone", i].tokens for i in range(3)]
        return self._texts[key][index]


def make_params(option: int, tokens: int, n: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, n=n, **OPTIONS[option])


class StressMachine(RuleBasedStateMachine):
    """The model: what was asked (prompt, option, tokens), what was said, and which forks are to say what."""

    folder: ClassVar[Path]
    undisturbed: ClassVar[Undisturbed]
    operations: ClassVar[int] = 0
    policy: ClassVar[str] = "lru"
    runner: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.disk = Path(tempfile.mkdtemp())
        self.sink = RecordingSink()
        nvme = {"nvme_kv_path": self.disk, "nvme_kv_gib": 64 * SLAB_BYTES / 2**30}
        tiers = {**nvme, "cpu_kv_gib": 12 * SLAB_BYTES / 2**30, "kv_restore": "always"}
        self.engine: Engine = make_engine(
            self.folder,
            blocks=BLOCKS,
            max_num_seqs=8,
            max_num_batched_tokens=48,
            max_model_len=LONGEST,
            sink=self.sink,
            tiers={**tiers, "eviction_policy": self.policy},
            **self.runner,
        )
        self.asked: dict[str, tuple[int, int, int]] = {}
        self.said: dict[tuple[str, int], list[int]] = {}
        self.forks: list[tuple[Sequence, tuple[int, int, int, int] | None]] = []

    @property
    def live(self) -> list[str]:
        return sorted(request_id for request_id, _ in self.engine._requests)

    @property
    def running(self) -> list[Sequence]:
        return [seq for seq in self.engine._batcher.running if not seq.restoring]

    def count(self) -> None:
        type(self).operations += 1
        self.engine.check_integrity()

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        option=st.integers(0, len(OPTIONS) - 1),
        tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def submit(self, prompt: int, option: int, tokens: int, n: int, priority: int, salt: str) -> None:
        name = f"r{len(self.asked)}"
        self.asked[name] = prompt, option, tokens
        params = make_params(option, tokens, n)
        self.engine.submit(make_submit(name, PROMPTS[prompt], params, priority=priority, cache_salt=salt))
        self.count()

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            for delta in self.engine.step():
                if delta.index < FORKS:
                    self.said.setdefault((delta.request_id, delta.index), []).extend(delta.tokens)
                self.check_finished(delta.request_id, delta.index, delta.finish_reason)
            self.count()

    @rule(which=WHICH, index=st.sampled_from([None, 0, 1]))
    def abort(self, which: int, index: int | None) -> None:
        if live := self.live:
            self.engine.abort(live[which % len(live)], 0, index)
        self.count()

    @rule(half=st.integers(0, 1))
    def disconnect(self, half: int) -> None:
        """A router is gone, and with it every second request."""
        for request_id in self.live[half::2]:
            self.engine.abort(request_id, 0)
        self.count()

    @rule(which=WHICH, own_way=st.booleans())
    def fork(self, which: int, own_way: bool) -> None:
        """A running sequence, wherever it stands, goes on twice: alike, or each in its own way."""
        parents = [seq for seq in self.running if not seq.pending and not seq.request.unborn]
        if not parents or not self.engine._batcher.has_room:
            return
        parent = parents[which % len(parents)]
        request = parent.request
        child = Sequence(request, FORKS + len(self.forks), parent.seed, [*parent.tokens], [])
        child.emitted = parent.emitted
        if own_way:
            child.seed += 1
        request.live.append(child)
        self.engine._kv.fork(parent, child)
        self.engine._batcher.start_forked(child)
        index = parent.index if parent.index < FORKS else None
        known = not own_way and index is not None
        self.forks.append((child, (*self.asked[request.request_id], index) if known else None))
        self.count()

    @rule()
    def preempt(self) -> None:
        """As if memory had run out: whoever came last makes room, unless it is the only one."""
        if len(self.engine._batcher.running) > 1:
            self.engine._batcher._preempt(self.engine._batcher.running[-1])
        self.count()

    @rule()
    def forget(self) -> None:
        self.engine.reset_prefix_cache()
        self.count()

    @rule(slot=st.integers(0, 63), offset=st.integers(0, SLAB_BYTES - 1))
    def damage(self, slot: int, offset: int) -> None:
        """A bit of a slab on disk flips."""
        (file,) = self.disk.iterdir()
        form = SlabForm("", SLAB_BYTES, 64)
        place = form.slabs_start + slot * form.stride + offset
        with file.open("r+b") as slabs:
            slabs.seek(place)
            byte = slabs.read(1)
            if byte:
                slabs.seek(place)
                slabs.write(bytes([byte[0] ^ 1]))
        self.count()

    @rule(sure=st.sampled_from([False] * 9 + [True]))
    def fail_a_tier(self, sure: bool) -> None:
        """The disk is pulled out: its file has no bytes any more."""
        if sure:
            (file,) = self.disk.iterdir()
            os.truncate(file, 0)
        self.count()

    def check_finished(self, request_id: str, index: int, reason: str | None) -> None:
        if reason is not None and index < FORKS:
            wanted = self.undisturbed.text(*self.asked[request_id], index)
            assert self.said[request_id, index] == wanted, f"{request_id}, sequence {index}"

    def teardown(self) -> None:
        try:
            for _ in range(5000):
                if not self.engine.has_work():
                    break
                self.step(1)
            assert not self.engine.has_work(), "something hangs"
            self.engine.check_integrity()
            stats = self.engine.stats()
            assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == BLOCKS
            assert stats.running == stats.waiting == stats.restoring == 0
            for child, wanted in self.forks:
                assert child.state is State.FINISHED
                length = len(child.tokens) - child.prompt_len
                if wanted is not None:
                    assert child.tokens[child.prompt_len :] == self.undisturbed.text(*wanted)[:length]
        finally:
            self.engine.close()
            shutil.rmtree(self.disk)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path) -> Undisturbed:
    return Undisturbed(tiny_llama)


@pytest.mark.timeout(0 if EXAMPLES else 300)
@pytest.mark.parametrize(
    ("policy", "runner"),
    [("lru", {}), ("cost", {"async_scheduling": True, "enforce_eager": False})],
    ids=["lru", "cost, pipelined"],
)
def test_stress(tiny_llama: Path, undisturbed: Undisturbed, policy: str, runner: dict[str, Any]) -> None:
    fields = {"folder": tiny_llama, "undisturbed": undisturbed, "policy": policy, "runner": runner}
    machine = type("Stress", (StressMachine,), {**fields, "operations": 0})
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES or 12,
            stateful_step_count=OPERATIONS,
            deadline=None,
            suppress_health_check=slow,
        ),
    )
    print(f"{machine.operations:,} operations")

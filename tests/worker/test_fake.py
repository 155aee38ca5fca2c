"""The fake engine's accounts and its text, without sockets."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from decodefleet.worker.config import BatchConfig, CacheConfig, EngineConfig, FakeConfig, ModelConfig
from decodefleet.worker.engine_api import Refused
from decodefleet.worker.fake import FakeEngine
from decodefleet.worker.fake_pool import FakePool
from decodefleet.worker.kv.hashing import extend_chain, pack_tokens
from decodefleet.worker.protocol import Submit, Tier, TokenDelta
from decodefleet.worker.sampling_params import InvalidRequest, SamplingParams

EOS = 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
}


class Held:
    """An EventSink that knows which blocks can be found."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()

    def kv_stored(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        assert not self.hashes & {*hashes}
        self.hashes |= {*hashes}

    def kv_removed(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        assert self.hashes >= {*hashes}
        self.hashes -= {*hashes}

    def kv_cleared(self) -> None:
        self.hashes.clear()


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[..., FakeEngine]:
    def make(sink: Held | None = None, blocks: int = 64, size: int = 4, **batch: int) -> FakeEngine:
        return build(tmp_path, sink or Held(), blocks, size, **batch)

    return make


def build(folder: Path, sink: Held, blocks: int, size: int, **batch: int) -> FakeEngine:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(
        model=ModelConfig(folder=folder, served_name="tiny"),
        cache=CacheConfig(block_size=size, num_gpu_blocks_override=blocks),
        batch=BatchConfig(**batch),
    )
    return FakeEngine(config, FakeConfig(step_base_s=0), sink, lambda _stage, _fraction: None)


def submit(request_id: str, prompt: list[int], **fields: Any) -> Submit:
    options = {key: fields.pop(key) for key in ("attempt", "resume", "ended", "cache_salt") if key in fields}
    params = SamplingParams(**{"temperature": 0, "max_tokens": 8, **fields})
    return Submit(
        request_id=request_id,
        incarnation="",
        epoch=0,
        prompt=pack_tokens(prompt),
        params=params,
        **options,
    )


def run(engine: FakeEngine) -> dict[tuple[str, int], list[TokenDelta]]:
    """To the end, with the accounts checked after every step."""
    found: dict[tuple[str, int], list[TokenDelta]] = {}
    while engine.has_work():
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), []).append(delta)
        engine.check_integrity()
    return found


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def test_greedy_text_is_the_prompt_and_then_its_end(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    engine.submit(submit("a", [5, 6, 7], max_tokens=20))
    deltas = run(engine)["a", 0]
    assert tokens(deltas) == [5, 6, 7, EOS]
    assert (deltas[-1].finish_reason, deltas[-1].stop_token) == ("stop", EOS)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1, "seed": 3, "n": 3}])
def test_text_depends_on_prompt_seed_and_position_only(
    make_engine: Callable[..., FakeEngine], fields: dict[str, Any]
) -> None:
    prompt = list(range(10, 40))
    alone = make_engine(max_num_seqs=1)
    alone.submit(submit("a", prompt, max_tokens=20, **fields))
    expected = {key: tokens(deltas) for key, deltas in run(alone).items()}
    # crowded, chunked, and preempted for want of blocks
    crowded = make_engine(blocks=18, max_num_batched_tokens=7)
    for name in ("b", "a", "c"):
        crowded.submit(submit(name, prompt, max_tokens=20, **fields))
    found = run(crowded)
    assert crowded.stats().preemptions > 0
    assert {key: tokens(found[key]) for key in expected} == expected
    # resumed behind the first five tokens
    resumed = make_engine()
    known = tuple(tuple(expected["a", index][:5]) for index in range(len(expected)))
    resumed.submit(submit("a", prompt, max_tokens=20, resume=known, attempt=1, **fields))
    assert {key: tokens(deltas) for key, deltas in run(resumed).items()} == {
        key: value[5:] for key, value in expected.items()
    }
    # without the one that had ended
    if len(expected) > 1:
        resumed.submit(
            submit("a", prompt, max_tokens=20, resume=((), *known[1:]), ended=(0,), attempt=2, **fields)
        )
        found = {key: tokens(deltas) for key, deltas in run(resumed).items()}
        assert found == {key: value[5:] for key, value in expected.items() if key[1] > 0}


def test_prefixes_are_found_and_salted(make_engine: Callable[..., FakeEngine]) -> None:
    held = Held()
    engine = make_engine(held)
    prompt = list(range(10, 27))

    def cached(request_id: str, **fields: Any) -> int | None:
        engine.submit(submit(request_id, prompt, **fields))
        return run(engine)[request_id, 0][0].cached_tokens

    assert cached("cold") == 0
    assert {*extend_chain(engine.card.hash_root, prompt, 4)} <= held.hashes
    assert cached("warm") == 16
    assert cached("salted", cache_salt="other tenant") == 0
    assert cached("scored", prompt_logprobs=1) == 0


def test_a_whole_cached_prompt_still_computes_one_token(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    for request_id, expected in (("cold", 0), ("warm", 12)):
        engine.submit(submit(request_id, list(range(10, 26))))
        assert run(engine)[request_id, 0][0].cached_tokens == expected


def test_who_waits_starts_while_a_step_has_budget_left(make_engine: Callable[..., FakeEngine]) -> None:
    """As the real batcher does: so the second of two with one prefix finds what the first has computed."""
    engine = make_engine(max_num_batched_tokens=16)
    shared = list(range(10, 26))
    for name in ("first", "second", "third"):
        engine.submit(submit(name, [*shared, 30], max_tokens=2))
    assert not engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 2)
    assert {delta.request_id: delta.cached_tokens for delta in engine.step()} == {
        "first": 0,
        "second": 16,
        "third": 16,
    }


def test_a_shared_prefix_needs_no_room_of_its_own(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine(blocks=16)
    shared = list(range(10, 50))
    for name in ("first", "second", "third"):
        engine.submit(submit(name, [*shared, 60], max_tokens=4))
        engine.step()
    assert engine.stats().running == 3
    engine.check_integrity()


def test_ends_of_a_sequence(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    engine.submit(submit("stop-token", [5, 6, 7], stop_token_ids=(9,), ignore_eos=True))
    engine.submit(submit("ignore", [5, 6, 7], ignore_eos=True))
    engine.submit(submit("min", [5, 6, 7], min_tokens=5))
    found = run(engine)
    assert tokens(found["stop-token", 0]) == [5, 6, 7, 9]
    assert found["stop-token", 0][-1].stop_token == 9
    assert tokens(found["ignore", 0]) == [5, 6, 7, 5, 6, 7, 5, 6]
    assert found["ignore", 0][-1].finish_reason == "length"
    assert tokens(found["min", 0]) == [5, 6, 7, 5, 6, EOS]


def test_logprobs_have_the_form_of_the_real_ones(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    engine.submit(submit("a", [5, 6, 7], logprobs=2, prompt_logprobs=1))
    first, *rest = run(engine)["a", 0]
    assert first.prompt_logprobs is not None
    assert [entry.token for entry in first.prompt_logprobs] == [6, 7]
    assert all(delta.prompt_logprobs is None for delta in rest)
    for delta in (first, *rest):
        assert delta.logprobs is not None
        assert [entry.token for entry in delta.logprobs] == list(delta.tokens)
        assert {len(entry.top_tokens) for entry in delta.logprobs} == {2}


def test_what_cannot_be_served_is_refused(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine(max_waiting=1)
    for prompt in ([], [1000], [5] * 256):
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(submit("bad", prompt))
        assert caught.value.field == "prompt"
    engine.submit(submit("first", [5]))
    with pytest.raises(Refused) as refused:
        engine.submit(submit("second", [5]))
    assert refused.value.reason == "queue_full"


def test_a_lost_reference_is_noticed() -> None:
    pool = FakePool(4, Held())
    block = pool.allocate()
    assert block is not None
    pool.check_integrity([block])
    with pytest.raises(AssertionError):
        pool.check_integrity([])


class EngineMachine(RuleBasedStateMachine):
    """Any order of submits, aborts and steps: the accounts hold, and at the end everything is back."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.held = Held()
        self.engine = build(
            self.folder, self.held, blocks=24, size=4, max_num_seqs=4, max_num_batched_tokens=16
        )
        self.number = 0

    @rule(length=st.integers(1, 60), n=st.integers(1, 4), output=st.integers(1, 30), shared=st.booleans())
    def submit(self, length: int, n: int, output: int, shared: bool) -> None:
        rng = random.Random(0 if shared else self.number)
        prompt = [rng.randrange(3, 1000) for _ in range(length)]
        self.engine.submit(submit(str(self.number), prompt, n=n, max_tokens=output, ignore_eos=True))
        self.number += 1

    @rule(number=st.integers(0, 20), index=st.none() | st.integers(0, 3))
    def abort(self, number: int, index: int | None) -> None:
        self.engine.abort(str(number), 0, index)

    @rule(count=st.integers(1, 10))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @invariant()
    def accounts_hold(self) -> None:
        self.engine.check_integrity()
        assert self.engine._pool._by_hash.keys() == self.held.hashes

    def teardown(self) -> None:
        run(self.engine)
        stats = self.engine.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
        assert stats.running == stats.waiting == 0


def test_accounts_hold_in_any_order(tmp_path: Path) -> None:
    EngineMachine.folder = tmp_path
    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )

"""KV from another worker's memory: whatever the other does, the text is what computing gives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from all_ways import GREEDY as GREEDY_PARAMS
from all_ways import PENALISED, SEEDED
from documents import DOCUMENT, GREEDY, SLAB_BYTES, cached, cpu_tier, documents, said
from engines import make_engine, make_submit, run_all, write_tiny_hybrid
from neighbours import Neighbour, lying_peer, neighbours, run_until_idle, slab_frame

from decodefleet.worker.peers.wire import Fetch, checksum, slab_form
from decodefleet.worker.protocol import Peer
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.transport import Security

BLOCKS = DOCUMENT // 16
# of a prompt at least one token is computed
FETCHED = BLOCKS - 1


def compute(folder: Path, prompt: list[int], params: SamplingParams = GREEDY, **options: Any) -> Any:
    engine = make_engine(folder, **options)
    engine.submit(make_submit("r", prompt, params))
    outcome = run_all(engine)["r", 0]
    engine.close()
    return said(outcome)


@pytest.mark.parametrize("params", [GREEDY_PARAMS, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
@pytest.mark.parametrize(
    "options",
    [{}, {"kv_cache_dtype": "int8"}, {"async_scheduling": True}],
    ids=["plain", "int8", "pipelined"],
)
def test_fetched_prefix_gives_the_same_text(
    tiny_llama: Path, params: dict[str, Any], options: dict[str, Any]
) -> None:
    (prompt,) = documents(1)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2, **params)
    wanted = compute(tiny_llama, prompt, sampling, **options)
    with neighbours(tiny_llama, **options) as (owner, other):
        owner.submit("first", prompt, sampling)
        first = run_until_idle([owner])["first", 0]
        other.submit("second", prompt, sampling, owner.peer(BLOCKS))
        second = run_until_idle([owner, other])["second", 0]
        assert said(first) == said(second) == wanted
        assert cached(second) == DOCUMENT - 16
        assert other.fetched == FETCHED
        slab_bytes = owner.engine._runner.kv.slabs.shape[1]
        assert owner.engine.stats().tiers["peer"].stored_bytes == FETCHED * slab_bytes
        assert other.engine.stats().prompt_tokens == 16
        # what was fetched is held, and told of
        assert len(other.engine._pool._block_of) >= FETCHED


def test_windows_fetch_what_they_see(tmp_path: Path) -> None:
    folder = write_tiny_hybrid(tmp_path, window=48)
    (prompt,) = documents(1)
    wanted = compute(folder, prompt, blocks=128)
    with neighbours(folder, blocks=128) as (owner, other):
        owner.submit("first", prompt, GREEDY)
        run_until_idle([owner])
        other.submit("second", prompt, GREEDY, owner.peer(BLOCKS))
        second = run_until_idle([owner, other])["second", 0]
        assert said(second) == wanted
        assert cached(second) == DOCUMENT - 16
        assert FETCHED < other.fetched < 3 * FETCHED


def test_what_left_the_pool_is_lent_from_host_memory(tiny_llama: Path) -> None:
    prompts = documents(4)
    wanted = compute(tiny_llama, prompts[0])
    with neighbours(tiny_llama, blocks=24, tiers=cpu_tier()) as (owner, other):
        for i, prompt in enumerate(prompts):
            owner.submit(str(i), prompt, GREEDY)
            run_until_idle([owner])
        owner.engine._pool.clear_cache()
        other.submit("again", prompts[0], GREEDY, owner.peer(BLOCKS))
        again = run_until_idle([owner, other])["again", 0]
        assert said(again) == wanted
        assert other.fetched == FETCHED
        # what came is worth a place in memory here, too
        assert other.engine.stats().tiers["cpu"].used_blocks >= FETCHED


def test_owner_computes_while_it_lends(tiny_llama: Path) -> None:
    prompts = documents(6)
    wanted = [compute(tiny_llama, prompt) for prompt in prompts]
    with neighbours(tiny_llama, blocks=96) as (owner, other):
        owner.submit("0", prompts[0], GREEDY)
        run_until_idle([owner])
        for i, prompt in enumerate(prompts[1:], start=1):
            owner.submit(str(i), prompt, GREEDY)
        other.submit("again", prompts[0], GREEDY, owner.peer(BLOCKS))
        outcomes = run_until_idle([owner, other])
        assert said(outcomes["again", 0]) == wanted[0]
        assert [said(outcomes[str(i), 0]) for i in range(1, 6)] == wanted[1:]
        assert other.fetched == FETCHED


def test_n_sequences_wait_for_one_fetch(tiny_llama: Path) -> None:
    (prompt,) = documents(1)
    params = SamplingParams(temperature=0.8, seed=4, n=3, max_tokens=6, ignore_eos=True, logprobs=1)
    with neighbours(tiny_llama, blocks=128) as (owner, other):
        owner.submit("r", prompt, params)
        wanted = run_until_idle([owner])
        other.submit("r", prompt, params, owner.peer(BLOCKS))
        found = run_until_idle([owner, other])
        assert {index: said(outcome) for index, outcome in found.items()} == {
            index: said(outcome) for index, outcome in wanted.items()
        }
        assert other.fetched == FETCHED


def test_stream_that_moved_fetches_what_it_had_generated(tiny_llama: Path) -> None:
    (prompt,) = documents(1)
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=60, ignore_eos=True)
    with neighbours(tiny_llama) as (owner, other):
        owner.submit("r", prompt, params)
        whole = run_until_idle([owner])["r", 0].tokens
        known = tuple(whole[:50])
        other.submit("r", prompt, params, owner.peer((DOCUMENT + 50) // 16), resume=(known,))
        rest = run_until_idle([owner, other])["r", 0].tokens
        assert [*known, *rest] == whole
        assert other.fetched == (DOCUMENT + 50 - 1) // 16


def test_encrypted(tiny_llama: Path) -> None:
    (prompt,) = documents(1)
    with neighbours(tiny_llama, security=Security.from_secret("hush")) as (owner, other):
        owner.submit("first", prompt, GREEDY)
        run_until_idle([owner])
        other.submit("second", prompt, GREEDY, owner.peer(BLOCKS))
        run_until_idle([owner, other])
        assert other.fetched == FETCHED


def test_another_form_is_a_miss(tiny_llama: Path) -> None:
    """Names of unlike caches differ already; an asker with other slabs gets nothing all the same."""
    (prompt,) = documents(1)
    with neighbours(tiny_llama) as (owner, other):
        owner.submit("first", prompt, GREEDY)
        run_until_idle([owner])
        names = [*owner.engine._pool._block_of][:3]
        answers: list[bool] = []
        for form in ("another form", slab_form(owner.engine.card.hash_root, SLAB_BYTES, "cpu")):
            other.links.fetch(
                owner.links.endpoint, names, form, lambda _, slab: answers.append(slab is not None)
            )
            wanted = len(answers) + 3
            while len(answers) < wanted:
                run_until_idle([owner])
        assert answers == [False] * 3 + [True] * 3


def test_computing_is_preferred_where_it_is_quicker(tiny_llama: Path) -> None:
    (prompt,) = documents(1)
    slow = {"kv_restore": "auto", "kv_peer_gbps": 1e-6}
    with neighbours(tiny_llama, tiers=slow) as (owner, other):
        for _ in range(2):
            owner.submit("first", prompt, GREEDY)
            run_until_idle([owner])
        other.submit("warm", documents(2)[1], GREEDY)
        run_until_idle([other])
        other.submit("second", prompt, GREEDY, owner.peer(BLOCKS))
        assert cached(run_until_idle([owner, other])["second", 0]) == 0
        assert other.fetched == 0


def make_silence(fetch: Fetch) -> Iterable[tuple[bytes, ...]]:
    return ()


def make_flipped(fetch: Fetch) -> Iterable[tuple[bytes, ...]]:
    for index, name in enumerate(fetch.each):
        slab = bytearray(SLAB_BYTES)
        right = checksum(name, bytes(slab))
        slab[100] ^= 1
        yield slab_frame(fetch, index, right), bytes(slab)


def make_short(fetch: Fetch) -> Iterable[tuple[bytes, ...]]:
    for index, name in enumerate(fetch.each):
        yield slab_frame(fetch, index, checksum(name, bytes(10))), bytes(10)


def make_nothing(fetch: Fetch) -> Iterable[tuple[bytes, ...]]:
    for index in range(len(fetch.each)):
        yield (slab_frame(fetch, index, None),)


def make_garbage(fetch: Fetch) -> Iterable[tuple[bytes, ...]]:
    yield (b"\x01garbage",)
    yield (b"",)
    yield slab_frame(fetch, 999, 0), bytes(SLAB_BYTES)
    yield from make_nothing(fetch)


ANSWERS = [make_silence, make_flipped, make_short, make_nothing, make_garbage]


@pytest.mark.parametrize("answer", ANSWERS)
def test_peers_that_fail_cost_a_computation_only(
    tiny_llama: Path, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (prompt,) = documents(1)
    wanted = compute(tiny_llama, prompt)
    other = Neighbour(tiny_llama, patience_s=0.2)
    with lying_peer(answer) as endpoint:
        peer = Peer(worker_id="w", incarnation="one", endpoint=endpoint, blocks=BLOCKS)
        for name in ("first", "second"):
            other.engine._pool.clear_cache()
            other.submit(name, prompt, GREEDY, peer)
            outcome = run_until_idle([other])[name, 0]
            assert said(outcome) == wanted
            assert cached(outcome) == 0
    assert other.fetched == 0
    assert other.engine.stats().tiers["peer"].corrupt_blocks == (2 * FETCHED if answer is make_flipped else 0)
    # one that says nothing is waited for once, and then left alone
    assert caplog.text.count("gives no KV blocks") == (answer is make_silence)
    other.close()


def test_peer_that_dies_half_way(tiny_llama: Path) -> None:
    (prompt,) = documents(1)
    wanted = compute(tiny_llama, prompt)
    owner, other = Neighbour(tiny_llama), Neighbour(tiny_llama, patience_s=0.3)
    owner.submit("first", prompt, GREEDY)
    run_until_idle([owner])
    slabs = owner.engine._runner.kv.slabs
    half = {
        name: slabs[block].numpy().tobytes() for name, block in [*owner.engine._pool._block_of.items()][:4]
    }

    def answer(fetch: Fetch) -> Iterable[tuple[bytes, ...]]:
        for index, name in enumerate(fetch.each):
            if name in half:
                yield slab_frame(fetch, index, checksum(name, half[name])), half[name]

    with lying_peer(answer) as endpoint:
        peer = Peer(worker_id="w", incarnation="one", endpoint=endpoint, blocks=BLOCKS)
        other.submit("second", prompt, GREEDY, peer)
        second = run_until_idle([other])["second", 0]
    assert said(second) == wanted
    # what came before it died is of use
    assert cached(second) == 4 * 16
    assert other.fetched == 4
    owner.close()
    other.close()


def test_abort_while_blocks_are_on_their_way(tiny_llama: Path) -> None:
    (prompt,) = documents(1)
    other = Neighbour(tiny_llama, patience_s=0.5)
    with lying_peer(make_silence) as endpoint:
        peer = Peer(worker_id="w", incarnation="one", endpoint=endpoint, blocks=BLOCKS)
        other.submit("gone", prompt, GREEDY, peer)
        other.engine.step()
        assert other.engine.stats().restoring == 1
        other.engine.abort("gone", 0)
        other.engine.check_integrity()
        run_until_idle([other])
    stats = other.engine.stats()
    assert stats.free_blocks == stats.total_blocks
    assert not other.engine._tiers.held_blocks()  # type: ignore[union-attr]
    other.close()


def test_the_latest_word_on_a_block_counts(tiny_llama: Path) -> None:
    """A block that was offered and not fetched is offered again by who has it now."""
    (prompt,) = documents(1)
    with neighbours(tiny_llama, 3) as (gone, owner, other):
        gone.links.close()
        owner.submit("first", prompt, GREEDY)
        run_until_idle([owner])
        # aborted before it is admitted: nothing of it is asked for
        other.submit("before", prompt, GREEDY, gone.peer(BLOCKS))
        other.engine.abort("before", 0)
        other.submit("second", prompt, GREEDY, owner.peer(BLOCKS))
        assert cached(run_until_idle([owner, other])["second", 0]) == DOCUMENT - 16
        assert other.fetched == FETCHED


def test_a_block_that_cannot_be_lent_is_given_back(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = documents(1)
    wanted = compute(tiny_llama, prompt)
    # it is told so: nobody's patience has to end
    owner, other = Neighbour(tiny_llama), Neighbour(tiny_llama, patience_s=3600)
    owner.submit("first", prompt, GREEDY)
    run_until_idle([owner])
    monkeypatch.setattr(owner.engine._tiers._peers._lender._copies, "save", lambda *_: 1 / 0)  # type: ignore[union-attr]
    other.submit("second", prompt, GREEDY, owner.peer(BLOCKS))
    assert said(run_until_idle([owner, other])["second", 0]) == wanted
    assert "could not be lent" in caplog.text
    stats = owner.engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    owner.close()
    other.close()


def test_a_block_that_cannot_be_taken_in_is_computed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = documents(1)
    wanted = compute(tiny_llama, prompt)
    with neighbours(tiny_llama) as (owner, other):
        owner.submit("first", prompt, GREEDY)
        run_until_idle([owner])
        monkeypatch.setattr(other.engine._tiers._peers.borrower._copies, "load", lambda *_: 1 / 0)  # type: ignore[union-attr]
        other.submit("second", prompt, GREEDY, owner.peer(BLOCKS))
        second = run_until_idle([owner, other])["second", 0]
        assert said(second) == wanted
        assert cached(second) == 0


def test_closing_while_blocks_are_lent(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The thread that lends ends before the links that it answers by."""
    (prompt,) = documents(1)
    owner, other = Neighbour(tiny_llama, tiers={"kv_peer_gbps": 1e-3}), Neighbour(tiny_llama)
    owner.submit("first", prompt, GREEDY)
    run_until_idle([owner])
    other.submit("second", prompt, GREEDY, owner.peer(BLOCKS))
    while not owner.engine._tiers._peers.lent_blocks:  # type: ignore[union-attr]
        other.engine.step()
        owner.engine.step()
    owner.close()
    other.close()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("kv-lender")]
    assert not caplog.records


def test_whoever_asked_may_go_away_before_all_is_lent(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept for a borrower that does not come back, nor sent after it for ever."""
    (prompt,) = documents(1)
    owner, other = Neighbour(tiny_llama), Neighbour(tiny_llama)
    owner.submit("first", prompt, GREEDY)
    run_until_idle([owner])
    lender = owner.engine._tiers._peers._lender  # type: ignore[union-attr]
    copying, save = threading.Event(), lender._copies.save
    monkeypatch.setattr(lender._copies, "save", lambda *args: copying.wait() and save(*args))
    other.submit("second", prompt, GREEDY, owner.peer(BLOCKS))
    while not lender.blocks:
        other.engine.step()
        owner.engine.step()
    other.close()
    copying.set()
    run_until_idle([owner])
    stats = owner.engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert not lender.busy
    owner.close()


def test_closing_with_blocks_on_their_way(tiny_llama: Path) -> None:
    (prompt,) = documents(1)
    other = Neighbour(tiny_llama)
    with lying_peer(make_silence) as endpoint:
        peer = Peer(worker_id="w", incarnation="one", endpoint=endpoint, blocks=BLOCKS)
        other.submit("r", prompt, GREEDY, peer)
        other.engine.step()
        began = time.monotonic()
        other.close()
        assert time.monotonic() - began < 15, "it waited for a peer"

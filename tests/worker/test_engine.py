from __future__ import annotations

import random
from pathlib import Path

import pytest
from engines import VOCAB, RecordingSink, make_engine, make_submit, run_all

from decodefleet.worker.engine import Engine
from decodefleet.worker.engine_api import Refused
from decodefleet.worker.kv.hashing import extend_chain, request_root
from decodefleet.worker.sampling_params import InvalidRequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts(count: int, *, length: int = 30, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for _ in range(count)]


def generate(
    engine: Engine, prompt: list[int], params: SamplingParams = GREEDY, **fields: object
) -> list[int]:
    engine.submit(make_submit("r", prompt, params, **fields))
    return run_all(engine)["r", 0].tokens


def test_a_request_ends_at_max_tokens_and_gives_everything_back(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.submit(make_submit("r", [5] * 20, GREEDY))
    outcome = run_all(engine)["r", 0]
    assert len(outcome.tokens) == 12
    assert outcome.finish_reason == "length"
    assert [len(delta.tokens) for delta in outcome.deltas] == [1] * 12
    assert outcome.deltas[0].cached_tokens == 0
    assert engine.stats().finished == {"length": 1}


def test_stop_tokens_end_a_sequence_and_are_reported(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    tokens = generate(engine, [5, 6, 7])
    stop = tokens[3]
    end = tokens.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    engine.submit(make_submit("s", [5, 6, 7], params))
    outcome = run_all(engine)["s", 0]
    assert outcome.tokens == tokens[: end + 1]
    assert (outcome.finish_reason, outcome.deltas[-1].stop_token) == ("stop", stop)


def test_min_tokens_holds_stop_tokens_back(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    stop = generate(engine, [5, 6, 7])[0]
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,), min_tokens=4
    )
    tokens = generate(engine, [5, 6, 7], params)
    assert stop not in tokens[:4]


def test_eos_of_the_model_ends_unless_ignored(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    bias = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={2: 100.0})
    assert generate(engine, [5, 6], bias) == [2]
    ignoring = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={2: 100.0}, ignore_eos=True)
    assert generate(engine, [5, 6], ignoring) == [2] * 5


def test_siblings_share_the_prompt_and_differ(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    params = SamplingParams(n=4, seed=7, max_tokens=10, ignore_eos=True, temperature=1.5)
    engine.submit(make_submit("r", [9] * 21, params))
    outcomes = run_all(engine)
    texts = [tuple(outcomes["r", i].tokens) for i in range(4)]
    assert len(set(texts)) == 4
    assert engine.stats().prompt_tokens == 21
    alone = SamplingParams(seed=7, max_tokens=10, ignore_eos=True, temperature=1.5)
    assert tuple(generate(engine, [9] * 21, alone)) == texts[0]


def test_more_siblings_than_may_run(tiny_llama: Path) -> None:
    params = SamplingParams(n=5, seed=7, max_tokens=6, ignore_eos=True)
    together, narrow = make_engine(tiny_llama), make_engine(tiny_llama, max_num_seqs=2)
    results = []
    for engine in (together, narrow):
        engine.submit(make_submit("r", [9] * 21, params))
        results.append({key: outcome.tokens for key, outcome in run_all(engine).items()})
    assert results[0] == results[1]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("index", [None, 0, 1, 2])
def test_abort_in_every_state(tiny_llama: Path, steps: int, index: int | None) -> None:
    engine = make_engine(tiny_llama, max_num_batched_tokens=16)
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    engine.submit(make_submit("r", [9] * 21, params))
    engine.submit(make_submit("other", [8] * 5, GREEDY))
    for _ in range(steps):
        engine.step()
    engine.abort("r", 0, index)
    engine.check_integrity()
    outcomes = run_all(engine)
    finished = {key for key, outcome in outcomes.items() if outcome.finish_reason is not None}
    expected = {("r", i) for i in range(3) if index is not None and i != index}
    assert finished == expected | {("other", 0)}


def test_abort_is_idempotent_and_ignores_strangers(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.abort("nobody", 0)
    engine.submit(make_submit("r", [9] * 21, GREEDY))
    engine.abort("r", 1)
    engine.abort("r", 0)
    engine.abort("r", 0)
    assert not engine.has_work()


def test_submit_is_idempotent(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.submit(make_submit("r", [9] * 5, GREEDY))
    engine.submit(make_submit("r", [9] * 5, GREEDY))
    assert len(run_all(engine)["r", 0].tokens) == 12


def test_resume_goes_on_where_the_other_attempt_stopped(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    params = SamplingParams(n=2, seed=3, max_tokens=12, ignore_eos=True)
    engine.submit(make_submit("r", [9] * 21, params))
    whole = run_all(engine)
    known = tuple(tuple(whole["r", i].tokens[:cut]) for i, cut in enumerate((5, 0)))
    engine.submit(make_submit("again", [9] * 21, params, resume=known))
    resumed = run_all(engine)
    assert resumed["again", 0].tokens == whole["r", 0].tokens[5:]
    assert resumed["again", 1].tokens == whole["r", 1].tokens


@pytest.mark.parametrize("resumes", [True, False])
def test_sequences_that_ended_are_left_out(tiny_llama: Path, resumes: bool) -> None:
    engine = make_engine(tiny_llama)
    params = SamplingParams(n=3, seed=3, max_tokens=12, ignore_eos=True)
    engine.submit(make_submit("r", [9] * 21, params))
    whole = run_all(engine)
    known = ((), tuple(whole["r", 1].tokens[:4]), tuple(whole["r", 2].tokens[:7])) if resumes else ()
    engine.submit(make_submit("again", [9] * 21, params, resume=known, ended=(0,)))
    resumed = run_all(engine)
    for index, cut in ((1, 4), (2, 7)):
        assert resumed["again", index].tokens == whole["r", index].tokens[cut if resumes else 0 :]
    assert ("again", 0) not in resumed


def test_a_resumed_sequence_finds_its_own_answer_in_the_cache(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.submit(make_submit("r", [9] * 21, params))
    whole = run_all(engine)["r", 0].tokens
    before = engine.stats().prefix_hit_tokens
    engine.submit(make_submit("again", [9] * 21, params, resume=(tuple(whole[:30]),)))
    run_all(engine)
    assert engine.stats().prefix_hit_tokens - before == 48


def test_prefix_hits_are_reported_and_announced(tiny_llama: Path) -> None:
    sink = RecordingSink()
    engine = make_engine(tiny_llama, sink=sink)
    prompt = prompts(1, length=40)[0]
    generate(engine, prompt)
    root = engine.card.hash_root
    assert set(extend_chain(root, prompt, 16)) <= sink.held
    engine.submit(make_submit("again", prompt, GREEDY))
    assert run_all(engine)["again", 0].deltas[0].cached_tokens == 32
    stats = engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (80, 32)
    assert engine.reset_prefix_cache() > 0
    assert sink.held == set()


def test_generated_tokens_are_found_again_by_the_next_turn(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    prompt = prompts(1, length=20)[0]
    answer = generate(engine, prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    engine.submit(make_submit("next", [*prompt, *answer, 7, 8, 9], GREEDY))
    # the last sampled token's own KV was never computed
    assert run_all(engine)["next", 0].deltas[0].cached_tokens == 48


def test_tenants_with_different_salts_share_nothing(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    prompt = prompts(1, length=40)[0]
    cached = []
    for salt in ("a", "b", "a"):
        engine.submit(make_submit("r", prompt, GREEDY, cache_salt=salt))
        cached.append(run_all(engine)["r", 0].deltas[0].cached_tokens)
    assert cached == [0, 0, 32]
    assert request_root(engine.card.hash_root, cache_salt="a") != engine.card.hash_root


def test_hashes_made_for_another_model_are_not_believed(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    prompt, other = prompts(2, length=40)
    generate(engine, prompt)
    stolen = b"".join(extend_chain(engine.card.hash_root, prompt, 16))
    engine.submit(make_submit("r", other, GREEDY, block_hashes=stolen, hash_root=b"x" * 16))
    assert run_all(engine)["r", 0].deltas[0].cached_tokens == 0


def test_prompt_logprobs_do_not_read_the_cache_and_match_generation(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3)
    engine.submit(make_submit("r", [5] * 33, params))
    outcome = run_all(engine)["r", 0]
    generated = [entry for delta in outcome.deltas for entry in delta.logprobs or ()]
    scored = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=3)
    engine.submit(make_submit("score", [5] * 33 + outcome.tokens, scored))
    (delta,) = run_all(engine)["score", 0].deltas
    assert delta.cached_tokens == 0
    assert delta.finish_reason == "length"
    assert delta.tokens == ()
    assert delta.prompt_logprobs is not None
    assert len(delta.prompt_logprobs) == 42
    assert list(delta.prompt_logprobs[32:]) == generated
    assert all(entry.rank == 1 and entry.top_tokens[0] == entry.token for entry in generated)


def test_a_prompt_of_full_length_can_be_scored(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_model_len=32)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, repetition_penalty=1.5)
    engine.submit(make_submit("score", [5] * 32, params))
    (delta,) = run_all(engine)["score", 0].deltas
    assert delta.prompt_logprobs is not None
    assert len(delta.prompt_logprobs) == 31


@pytest.mark.parametrize(
    ("submit", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [1] * 512}, "prompt"),
        ({"prompt": [1], "params": SamplingParams(stop_token_ids=(VOCAB,))}, "stop_token_ids"),
        ({"prompt": [1], "params": SamplingParams(logit_bias={VOCAB: 1.0})}, "logit_bias"),
        ({"prompt": [1], "params": SamplingParams(n=2), "resume": ((),)}, "resume"),
        ({"prompt": [1], "resume": ((VOCAB,),)}, "resume"),
        ({"prompt": [1], "params": SamplingParams(max_tokens=2), "resume": ((5, 5),)}, "resume"),
        ({"prompt": [1], "params": SamplingParams(n=2), "ended": (0, 1)}, "ended"),
    ],
)
def test_bad_requests_name_the_field(tiny_llama: Path, submit: dict[str, object], field: str) -> None:
    engine = make_engine(tiny_llama)
    with pytest.raises(InvalidRequest) as error:
        engine.submit(make_submit("r", **submit))  # type: ignore[arg-type]
    assert error.value.field == field
    assert not engine.has_work()


def test_a_full_queue_refuses(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_waiting=2)
    for i in range(2):
        engine.submit(make_submit(str(i), [5], GREEDY))
    with pytest.raises(Refused) as refusal:
        engine.submit(make_submit("2", [5], GREEDY))
    assert refusal.value.reason == "queue_full"
    assert len(run_all(engine)) == 2


def test_max_model_len_bounds_the_output(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_model_len=32)
    tokens = generate(engine, [5] * 20, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert len(tokens) == 12


def test_a_pool_smaller_than_the_model_bounds_it(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, blocks=3)
    assert engine.card.max_model_len == 48
    tokens = generate(engine, [5] * 20, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert len(tokens) == 28
    assert engine.stats().preemptions == 0


def test_logprobs_are_a_distribution(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True, logprobs=20, temperature=2.0)
    engine.submit(make_submit("r", [5] * 4, params))
    outcome = run_all(engine)["r", 0]
    for delta in outcome.deltas:
        assert delta.logprobs is not None
        (entry,) = delta.logprobs
        assert entry.token == delta.tokens[0]
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
        if entry.rank <= 20:
            assert entry.top_logprobs[entry.rank - 1] == pytest.approx(entry.logprob)


def test_penalties_change_what_is_said(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    plain = generate(engine, [5] * 8, GREEDY)
    strict = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, presence_penalty=2.0, frequency_penalty=2.0
    )
    penalised = generate(engine, [5] * 8, strict)
    assert len(set(penalised)) >= len(set(plain))
    harsh = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, repetition_penalty=50.0)
    assert 5 not in generate(engine, [5] * 8, harsh)


def test_stats_count_what_happened(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    for i, prompt in enumerate(prompts(3)):
        engine.submit(make_submit(str(i), prompt, GREEDY))
    assert engine.stats().waiting == 3
    assert engine.stats().waiting_prefill_tokens == 90
    run_all(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.finished) == (90, 36, {"length": 3})
    assert stats.step_time is not None
    assert stats.step_time.seconds(16, 100, 2) > 0


def test_close_ends_everything(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.submit(make_submit("r", [5] * 20, SamplingParams(n=3, max_tokens=50)))
    engine.step()
    engine.close()
    assert not engine.has_work()
    engine.check_integrity()

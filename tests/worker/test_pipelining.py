"""Two steps in flight, in padded batches, against one at a time: the same text, sound accounts throughout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from engines import VOCAB, Outcome, RecordingSink, make_engine, make_submit, run_all
from hypothesis import given, settings
from hypothesis import strategies as st

from decodefleet.worker.engine import Engine
from decodefleet.worker.sampling_params import SamplingParams

Outcomes = dict[tuple[str, int], Outcome]

PROMPTS = [[(7 * i + 11 * j * j) % (VOCAB - 3) + 3 for j in range(70)] for i in range(3)]


@dataclass(frozen=True)
class Job:
    """arrives: at which step; aborted: how many steps later, and which sequence (None: all)."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborted: tuple[int, int | None] | None

    def cut(self, index: int) -> bool:
        return self.aborted is not None and self.aborted[1] in (None, index)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    n = draw(st.sampled_from([1, 1, 2, 3]))
    params = SamplingParams(
        n=n,
        temperature=draw(st.sampled_from([0.0, 0.8, 1.5])),
        seed=draw(st.integers(0, 5)),
        max_tokens=draw(st.integers(1, 20)),
        min_tokens=draw(st.integers(0, 1)),
        top_k=draw(st.sampled_from([0, 20])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        logit_bias=draw(st.sampled_from([{}, {5: 3.0}])),
        logprobs=draw(st.sampled_from([None, None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        # a tenth of the vocabulary, so that many end by what was sampled
        stop_token_ids=tuple(range(3, VOCAB, 10)),
    )
    prompt = draw(st.sampled_from(PROMPTS))[: draw(st.integers(1, 70))]
    aborted = st.tuples(st.integers(0, 8), st.sampled_from([None, *range(n)]))
    return Job(prompt, params, draw(st.integers(0, 12)), draw(st.none() | st.none() | aborted))


@cache
def engine_of(folder: Path, pipelined: bool, blocks: int) -> tuple[Engine, RecordingSink]:
    sink = RecordingSink()
    engine = make_engine(
        folder,
        blocks=blocks,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        sink=sink,
        async_scheduling=pipelined,
        enforce_eager=not pipelined,
    )
    return engine, sink


def drive(engine: Engine, work: list[Job]) -> Outcomes:
    """Arrivals and aborts at their steps, integrity after each, and everything given back in the end."""
    outcomes: Outcomes = {}
    last = max(job.arrives + (job.aborted[0] if job.aborted else 0) for job in work)
    for now in range(last + 1):
        for i, job in enumerate(work):
            if job.arrives == now:
                engine.submit(make_submit(str(i), job.prompt, job.params))
            if job.aborted is not None and job.arrives + job.aborted[0] == now:
                engine.abort(str(i), 0, job.aborted[1])
                engine.check_integrity()
        for delta in engine.step():
            outcome = outcomes.setdefault((delta.request_id, delta.index), Outcome())
            outcome.tokens += delta.tokens
            outcome.deltas.append(delta)
        engine.check_integrity()
    for key, rest in run_all(engine).items():
        outcome = outcomes.setdefault(key, Outcome())
        outcome.tokens += rest.tokens
        outcome.deltas += rest.deltas
    return outcomes


def told(outcome: Outcome) -> tuple[object, ...]:
    """All that a client learns but how the cache helped."""
    first = outcome.deltas[0].prompt_logprobs
    logprobs = [entry for delta in outcome.deltas for entry in delta.logprobs or ()]
    return outcome.tokens, logprobs, first, outcome.finish_reason, outcome.deltas[-1].stop_token


@settings(max_examples=60, deadline=None)
@given(work=st.lists(jobs(), min_size=1, max_size=6), blocks=st.sampled_from([7, 12, 40]))
def test_pipelining_changes_nothing_but_the_time(tiny_llama: Path, work: list[Job], blocks: int) -> None:
    results = []
    for pipelined in (False, True):
        engine, sink = engine_of(tiny_llama, pipelined, blocks)
        results.append(drive(engine, work))
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_blocks + stats.cached_blocks == blocks == engine.total_blocks
        engine.reset_prefix_cache()
        assert sink.held == set()
    plain, pipelined_ = results
    for i, job in enumerate(work):
        for index in range(job.params.n):
            a, b = (result.get((str(i), index), Outcome()) for result in results)
            if job.cut(index):
                shorter = min(len(a.tokens), len(b.tokens))
                assert a.tokens[:shorter] == b.tokens[:shorter]
            else:
                assert told(plain[str(i), index]) == told(pipelined_[str(i), index])


@pytest.mark.parametrize("steps", range(6))
def test_the_token_after_the_last_is_dropped(tiny_llama: Path, steps: int) -> None:
    """A stop token found one step late: nothing of what was computed meanwhile gets out or stays held."""
    engine = make_engine(tiny_llama, async_scheduling=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.submit(make_submit("whole", [5, 6, 7], greedy))
    whole = run_all(engine)["whole", 0].tokens
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(whole[steps],))
    engine.submit(make_submit("cut", [5, 6, 7], params))
    outcome = run_all(engine)["cut", 0]
    assert outcome.tokens == whole[: whole.index(whole[steps]) + 1]
    assert outcome.finish_reason == "stop"
    assert engine.stats().generated_tokens == 12 + len(outcome.tokens)


def test_the_first_step_gives_no_news_and_the_last_no_work(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, async_scheduling=True)
    engine.submit(make_submit("r", [5] * 20, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)))
    tokens = []
    while engine.has_work():
        tokens.append([token for delta in engine.step() for token in delta.tokens])
    assert [len(step) for step in tokens] == [0, 1, 1, 1]
    assert engine.stats().steps == 3


def test_closing_with_a_step_in_flight(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, async_scheduling=True)
    engine.submit(make_submit("r", [5] * 20, SamplingParams(n=3, max_tokens=50)))
    engine.step()
    engine.close()
    assert not engine.has_work()
    engine.check_integrity()

"""The offline API with the real small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from decodefleet.worker.llm import LLM, SamplingParams
from decodefleet.worker.sampling_params import InvalidRequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    return LLM(str(smollm2), max_model_len=256, num_gpu_blocks_override=32)


def test_prompts_are_answered_in_order(llm: LLM) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    outputs = llm.generate([*prompts, llm.tokenizer.encode(prompts[0])], GREEDY, progress=False)
    assert [output.prompt for output in outputs] == [*prompts, None]
    france, numbers, again = (output.outputs[0] for output in outputs)
    assert "Paris" in france.text
    assert " four" in numbers.text
    assert (again.text, again.token_ids, again.finish_reason) == (france.text, france.token_ids, "length")


def test_each_of_n_ends_at_its_own_stop_string(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=60, stop=(" the",))
    (output,) = llm.generate("It was", params, progress=False)
    assert len({completion.text for completion in output.outputs}) > 1
    assert all(" the" not in completion.text for completion in output.outputs)
    assert "stop" in {completion.finish_reason for completion in output.outputs}


def test_a_stream_that_is_left_gives_everything_back(llm: LLM) -> None:
    whole = llm.generate("The capital of France is", GREEDY, progress=False)[0].outputs[0].text
    assert "".join(llm.stream("The capital of France is", GREEDY)) == whole
    stream = llm.stream("The capital of France is", SamplingParams(max_tokens=None, ignore_eos=True))
    assert next(stream)
    stream.close()
    assert not llm.engine.has_work()
    llm.engine.check_integrity()


@pytest.mark.parametrize("tokens", [[], [-1], [1 << 32], [49152]])
def test_a_prompt_that_cannot_be_served_runs_nothing(llm: LLM, tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.generate(["fine", tokens], GREEDY, progress=False)
    assert refused.value.field == "prompt"
    assert not llm.engine.has_work()


def test_unknown_options_are_named(smollm2: Path) -> None:
    with pytest.raises(TypeError, match="max_modle_len"):
        LLM(str(smollm2), max_modle_len=1)

"""The official client against the whole way of a request. The fake engine echoes its prompt, which says
beforehand what each answer must be."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import openai
import pytest

TEXT = "Tiny steps: 你好世界 🎉👩‍👩‍👧 and naïve café, then STOP here, and on it goes."


@pytest.fixture
def client(stack: Any) -> Any:
    with stack.client() as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_completion_echoes_and_counts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=TEXT, temperature=0, max_tokens=200)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    # the end token counts as generated
    assert usage.completion_tokens == usage.prompt_tokens + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_length_ends_an_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=TEXT, temperature=0, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert TEXT.startswith(answer.choices[0].text)


def test_streamed_text_is_whole_characters(client: openai.OpenAI) -> None:
    parts = [
        chunk.choices[0].text
        for chunk in client.completions.create(
            model="tiny", prompt=TEXT, temperature=0, max_tokens=200, stream=True
        )
    ]
    assert "".join(parts) == TEXT
    assert len(parts) > 10
    assert not any("\ufffd" in part for part in parts)


def test_a_second_request_finds_its_prefix(client: openai.OpenAI) -> None:
    prompt = "A prefix that nobody else sends, long enough for several blocks of sixteen tokens. " * 4
    cached = []
    for _ in range(2):
        usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] >= 48


def test_chat_streams_a_role_first_and_usage_last(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "system", "content": "Echo."}, {"role": "user", "content": TEXT}],
            temperature=0,
            max_completion_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert TEXT in text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "seed": 7, "max_tokens": 30, "n": 3}
    whole = client.completions.create(**options)
    streamed: dict[int, str] = defaultdict(str)
    finished: dict[int, list[str]] = defaultdict(list)
    usages = []
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            if choice.finish_reason:
                finished[choice.index].append(choice.finish_reason)
    assert {choice.index: choice.text for choice in whole.choices} == dict(streamed)
    assert len({*streamed.values()}) == 3
    assert dict(finished) == {0: ["length"], 1: ["length"], 2: ["length"]}
    assert usages == [None] * (len(usages) - 1) + [whole.usage]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 90


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["STOP", "P here", "世界 🎉", "👩‍👧 and"])
def test_stop_strings_may_straddle_tokens(client: openai.OpenAI, stop: str, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": TEXT,
        "temperature": 0,
        "max_tokens": 200,
        "stop": [stop, "never there"],
    }
    if stream:
        parts = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
        text, reason = "".join(part.text for part in parts), parts[-1].finish_reason
        assert not any("\ufffd" in part.text for part in parts)
    else:
        choice = client.completions.create(**options).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert text == TEXT[: TEXT.index(stop)]
    assert reason == "stop"


def test_stop_string_can_be_kept(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt=TEXT,
        temperature=0,
        max_tokens=200,
        stop="STOP",
        extra_body={"include_stop_str_in_output": True},
    )
    assert answer.choices[0].text == TEXT[: TEXT.index("STOP")] + "STOP"


def test_stop_token_ids_and_ignore_eos(client: openai.OpenAI, stack: Any) -> None:
    with stack.http() as http:
        tokens = http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    answer = client.completions.create(
        model="tiny",
        prompt=tokens,
        temperature=0,
        max_tokens=len(tokens) + 20,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    choice: Any = answer.choices[0]
    assert choice.token_ids == [*tokens, *tokens[:20]]
    assert choice.prompt_token_ids == tokens
    assert choice.finish_reason == "length"


def test_completion_logprobs_stay_in_step_with_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "temperature": 0, "max_tokens": 200}
    whole = client.completions.create(**options, logprobs=2).choices[0]
    assert whole.logprobs is not None
    offsets = whole.logprobs.text_offset
    assert offsets is not None
    assert whole.logprobs.tokens is not None
    assert offsets == sorted(offsets)
    for token, offset in zip(whole.logprobs.tokens, offsets, strict=True):
        if not token.startswith("bytes:"):
            assert whole.text[offset : offset + len(token)] == token
    streamed_tokens: list[str] = []
    for chunk in client.completions.create(**options, logprobs=2, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed_tokens += chunk.choices[0].logprobs.tokens or []
    assert streamed_tokens == whole.logprobs.tokens


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="one two three", temperature=0, max_tokens=2, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == "one two threeone two"
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["one", " two", " three", "one", " two"]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset == [0, 3, 7, 13, 16]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "🎉 done"}],
        temperature=0,
        max_tokens=60,
        logprobs=True,
        top_logprobs=3,
        extra_body={"skip_special_tokens": False},
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == choice.message.content
    assert {len(entry.top_logprobs) for entry in content} == {3}


def test_several_prompts_of_every_form(client: openai.OpenAI) -> None:
    texts = client.completions.create(
        model="tiny", prompt=["one two three", "four five six"], temperature=0, n=2, max_tokens=3
    )
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in texts.choices] == ["one two three"] * 2 + ["four five six"] * 2
    ids = client.completions.create(
        model="tiny", prompt=[[100, 101, 102], [103, 104]], temperature=0, max_tokens=2
    )
    assert [choice.index for choice in ids.choices] == [0, 1]


def test_errors_reach_the_client_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="unknown", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x " * 5000)
    assert caught.value.param == "prompt"
    assert "2048" in str(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_completion_tokens=5000
        )
    assert caught.value.param == "max_completion_tokens"

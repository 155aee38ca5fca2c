"""The official client against the real model on two workers, with all parts between them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

EMOJI = "🎉👩‍👩‍👧🎉👩‍👩‍👧🎉👩‍👩‍👧🎉👩‍👩‍👧🎉👩‍👩‍👧"
CHINESE = "你好世界，你好世界，你好世界，你好世界，你好"


@pytest.fixture(scope="module")
def real(make_stack: Callable[..., Any]) -> Any:
    return make_stack(workers=2, fake=False, blocks=192, max_num_seqs=16)


@pytest.fixture
def client(real: Any) -> Any:
    with real.client() as client:
        yield client


def complete(client: openai.OpenAI, prompt: str, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 24, **options}
    return client.completions.create(model="tiny", prompt=prompt, **options)


def streamed(client: openai.OpenAI, prompt: str, **options: Any) -> list[str]:
    return [
        chunk.choices[0].text for chunk in complete(client, prompt, stream=True, **options) if chunk.choices
    ]


def test_chat_answers_sensibly(client: openai.OpenAI) -> None:
    # a question at which the two likeliest tokens are well apart all through the answer
    messages: Any = [{"role": "user", "content": "How many days are in a week?"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == "A week is approximately 7 days."
    assert answer.choices[0].finish_reason == "stop"
    parts = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=20, stream=True
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize("prompt", [EMOJI, CHINESE, "The recipe says:"], ids=["emoji", "chinese", "latin"])
def test_streams_are_whole_characters(client: openai.OpenAI, prompt: str) -> None:
    whole = complete(client, prompt).choices[0].text
    pieces = streamed(client, prompt)
    assert "".join(pieces) == whole
    # the last token may end inside a character; no other piece may
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert prompt.isascii() == whole.isascii()


def test_a_stop_string_across_tokens_leaves_no_trace(client: openai.OpenAI) -> None:
    prompt = "The alphabet: a, b, c, d,"
    answer = complete(client, prompt, logprobs=0)
    text, offsets = answer.choices[0].text, answer.choices[0].logprobs.text_offset
    border = offsets[6] - offsets[0]
    stop = text[border - 2 : border + 2]
    cut = text[: text.index(stop)]
    stopped = complete(client, prompt, stop=[stop])
    assert stopped.choices[0].text == cut
    assert stopped.choices[0].finish_reason == "stop"
    assert "".join(streamed(client, prompt, stop=[stop])) == cut


def test_logprobs_belong_to_their_tokens(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Say something about naïve cafés 🎉."}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=24, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    data = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert data.decode() == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        # greedy: the chosen one is the best
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


def test_seeds_decide_all_of_three_answers(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1.0, "top_p": 0.95}
    first, again = (complete(client, "Once upon a time", **options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    other = complete(client, "Once upon a time", **{**options, "seed": 8})
    assert {choice.text for choice in other.choices}.isdisjoint(texts)


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    generated = complete(client, "The capital of France is", logprobs=2, max_tokens=6)
    text = "The capital of France is" + generated.choices[0].text
    scored = complete(client, text, logprobs=2, max_tokens=0, echo=True)
    assert scored.choices[0].text == text
    logprobs = scored.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    # scoring computes what generating did, bit for bit
    assert logprobs.token_logprobs[-6:] == generated.choices[0].logprobs.token_logprobs


def test_both_workers_say_the_same(real: Any, client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[str, str]:
        answer = complete(client, f"Note {number % 2}. The best thing about rain is", seed=3, temperature=0.8)
        (placement,) = real.scheduler.placements(answer.id)
        return str(placement["worker_id"]), f"{number % 2} {answer.choices[0].text}"

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    assert len({worker for worker, _ in answers}) == 2
    assert len({text for _, text in answers}) == 2


def test_clients_that_leave_give_everything_back(real: Any) -> None:
    rng = random.Random(5)

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": "tiny",
            "prompt": f"{number} " + "and so on " * rng.randrange(1, 30),
            "max_tokens": 24,
        }
        body |= {"stream": rng.random() < 0.7, "n": 3 if number % 5 == 0 else 1, "ignore_eos": True}
        try:
            async with asyncio.timeout(rng.choice((0.01, 0.2, 1.0, 3.0)) if number % 3 == 0 else None):
                response = await client.post("/v1/completions", json=body)
        except TimeoutError:
            return
        assert response.status_code == 200

    async def storm() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=real.url, limits=limits, timeout=120) as client:
            await asyncio.gather(*(ask(client, number) for number in range(40)))

    asyncio.run(storm())
    deadline = time.monotonic() + 30
    while not all_back(real):
        assert time.monotonic() < deadline, "blocks, sequences or reservations are left"
        time.sleep(0.05)


def all_back(real: Any) -> bool:
    workers = all(
        stats.running == stats.waiting == 0 and stats.free_blocks + stats.cached_blocks == stats.total_blocks
        for stats in real.stats()
    )
    return workers and not [*real.scheduler.core.ledger] and not [*real.scheduler.core.queue]

"""Text work of the front end: off the event loop, and refused where it is not worth beginning."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from tiny_peers import CARD

from decodefleet.cluster.text_service import SHORT_TOKENS, TextService
from decodefleet.worker.sampling_params import InvalidRequest

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def text(smollm2: Path) -> AsyncIterator[TextService]:
    card = msgspec.structs.replace(CARD, folder=str(smollm2), vocab_size=49152)
    with ThreadPoolExecutor(1) as executor:
        yield await TextService.load(card, executor)


async def test_the_event_loop_goes_on_while_text_is_worked_on(text: TextService) -> None:
    """Whoever asks for a life sign meanwhile is answered: nothing of it is done on the loop."""
    held = threading.Event()
    text._executor.submit(held.wait)
    try:
        work = [
            asyncio.ensure_future(each)
            for each in (
                text.encode("hello " * 200, add_special_tokens=False),
                text.encode_chat(CHAT, add_generation_prompt=True, add_special_tokens=False),
                text.decode([5, 6, 7]),
                text.hash([5] * (SHORT_TOKENS + 1), ""),
            )
        ]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not any(each.done() for each in work)
    finally:
        held.set()
    tokens, chat, words, prompt = await asyncio.gather(*work)
    assert len(tokens) >= 200
    assert chat
    assert words
    assert len(prompt.block_hashes) == 16 * (SHORT_TOKENS // 16)


async def test_a_text_that_is_too_long_by_far_is_not_tokenized(
    text: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text.tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    with pytest.raises(InvalidRequest, match="are at least") as caught:
        await text.encode("x" * 4_000_000, add_special_tokens=False)
    assert caught.value.field == "prompt"

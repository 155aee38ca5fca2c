"""Text work of the front end, off the event loop: tokenize, render chats, hash blocks. One per model.

The tokenizer releases the GIL, so a few threads are enough, and a long prompt holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from decodefleet.worker.kv.hashing import extend_chain, pack_tokens, request_root
from decodefleet.worker.protocol import ModelCard
from decodefleet.worker.sampling_params import InvalidRequest
from decodefleet.worker.text.tokenizer import Tokenizer

T = TypeVar("T")

# a tokenizer's normaliser may make a text shorter, but hardly by more than this
SHRINKS = 4
# to hash no more than these takes less time than to hand them to a thread
SHORT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as workers and scheduler take it: packed too, with the hashes of its full blocks, joined."""

    tokens: list[int]
    packed: bytes
    block_hashes: bytes


class TextService:
    """Built by `load`; every method may be called concurrently."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, longest_token: int, executor: Executor) -> None:
        """longest_token: bytes of the vocabulary's longest token."""
        self.card = card
        self.tokenizer = tokenizer
        self._longest_token = longest_token
        self._executor = executor

    @classmethod
    async def load(cls, card: ModelCard, executor: Executor) -> TextService:
        def work() -> tuple[Tokenizer, int]:
            tokenizer = Tokenizer.from_folder(Path(card.folder))
            longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
            return tokenizer, longest

        tokenizer, longest = await asyncio.get_running_loop().run_in_executor(executor, work)
        return cls(card, tokenizer, longest, executor)

    def for_card(self, card: ModelCard) -> TextService:
        """The same tokenizer for the same folder's model in another KV form."""
        return TextService(card, self.tokenizer, self._longest_token, self._executor)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises InvalidRequest for a text that is too long to be worth the work."""
        return await self._run(lambda: self._encode(text, add_special_tokens))

    async def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool, add_special_tokens: bool
    ) -> list[int]:
        """Raises ChatTemplateError where the model's template refuses the messages."""

        def work() -> list[int]:
            text = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt
            )
            return self._encode(text, add_special_tokens)

        return await self._run(work)

    async def decode(self, tokens: Sequence[int]) -> str:
        return await self._run(lambda: self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    async def hash(self, tokens: list[int], cache_salt: str) -> Prompt:
        def work() -> Prompt:
            root = request_root(self.card.hash_root, cache_salt=cache_salt)
            hashes = extend_chain(root, tokens, self.card.block_size)
            return Prompt(tokens, pack_tokens(tokens), b"".join(hashes))

        return work() if len(tokens) <= SHORT_TOKENS else await self._run(work)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # megabytes of text would keep a thread busy for seconds, only to be refused after all
        least = len(text) // (SHRINKS * self._longest_token)
        if least > self.card.max_model_len:
            raise InvalidRequest(
                "prompt",
                f"{len(text)} characters are at least {least} tokens; "
                f"the model takes {self.card.max_model_len} in all",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

"""All generations of one HTTP request, as one: started together, read together, given up together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ..generation import Generation
from ..sequence_text import Piece
from .wire import PromptTokensDetails, Usage

News = list[tuple[int, Piece]]
"""Pieces, each with the number of its prompt."""


class Answers:
    """One generation per prompt. `close` in every case; it never waits.

    on_close: told how many tokens were generated, each time.
    """

    def __init__(self, generations: Sequence[Generation], on_close: Callable[[int], None]) -> None:
        self.generations = generations
        self._on_close = on_close
        self._tasks: dict[asyncio.Task[list[Piece] | None], int] = {}

    async def start(self) -> None:
        """Until a worker has one of them: each runs at its own pace, for one that ends may be what lets
        another begin. Raises DataplaneError."""
        if len(self.generations) == 1:
            await self.generations[0].start()
            return
        self._tasks = {
            asyncio.create_task(_begin(generation)): number
            for number, generation in enumerate(self.generations)
        }
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def take(self) -> News | None:
        """News of any of them, at least one piece; None when all have ended. Raises DataplaneError."""
        if len(self.generations) == 1:
            pieces = await self.generations[0].take()
            return None if pieces is None else [(0, piece) for piece in pieces]
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            news = [(number, piece) for task in done for number, piece in self._advance(task)]
            if news:
                return news
        return None

    def close(self) -> None:
        for task in self._tasks:
            drop(task)
        for generation in self.generations:
            generation.close()
        self._on_close(sum(generation.generated for generation in self.generations))

    def usage(self) -> Usage:
        prompt = sum(len(generation.request.prompt.tokens) for generation in self.generations)
        generated = sum(generation.generated for generation in self.generations)
        cached = sum(generation.cached_tokens for generation in self.generations)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def _advance(self, task: asyncio.Task[list[Piece] | None]) -> News:
        number = self._tasks.pop(task)
        pieces = task.result()
        if pieces is None:
            return []
        self._tasks[asyncio.create_task(self.generations[number].take())] = number
        return [(number, piece) for piece in pieces]


async def _begin(generation: Generation) -> list[Piece]:
    await generation.start()
    return []


def drop(task: asyncio.Future[Any]) -> None:
    """Nobody wants its result any more, nor to hear of its failure."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())

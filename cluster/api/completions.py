"""POST /v1/completions: text or token ids in, text out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ..sequence_text import Piece
from ..text_service import TextService
from .answers import Answers
from .errors import BadRequest
from .front import Front, encode, json_response, new_id
from .logprobs import completion_logprobs, prompt_logprobs
from .schemas import CompletionRequest
from .sse import event
from .wire import Completion, CompletionChoice, CompletionLogprobs, Usage

DEFAULT_MAX_TOKENS = 16


async def create_completion(front: Front, request: Request) -> Response:
    """What follows a prompt, or each of several, whole or as a stream."""
    body = await front.body(request, CompletionRequest)
    card = front.card(body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadRequest("best_of must equal n", param="best_of")
    text = await front.router.text(card)
    prompts = await _prompts(front, text, body)
    params = body.sampling(
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        echo_scored=bool(body.echo) and body.logprobs is not None,
    )
    answer_id = new_id("cmpl")
    echoes = await _echoes(text, body, prompts)
    answers = await front.answers(request, answer_id, card, prompts, params, body)
    writer = _Writer(body, text, answers, answer_id, card.name, echoes)
    if body.stream:
        return await front.stream(request, answers, writer.events())
    return json_response(await front.collect(request, answers, writer.collect()))


async def _prompts(front: Front, text: TextService, body: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt. Raises BadRequest."""
    given = body.prompt
    entries = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if len(entries) > front.settings.max_prompts:
        raise BadRequest(f"at most {front.settings.max_prompts} prompts in one request", param="prompt")
    special = body.add_special_tokens is not False
    return [
        await text.encode(entry, add_special_tokens=special) if isinstance(entry, str) else list(entry)
        for entry in entries
    ]


async def _echoes(text: TextService, body: CompletionRequest, prompts: Sequence[list[int]]) -> list[str]:
    """What is put in front of each answer."""
    if not body.echo:
        return [""] * len(prompts)
    if isinstance(body.prompt, str):
        return [body.prompt]
    return [
        entry if isinstance(entry, str) else await text.decode(tokens)
        for entry, tokens in zip(body.prompt, prompts, strict=False)
    ]


class _Writer:
    """Pieces to choices; choice number = prompt number · n + sequence."""

    def __init__(
        self,
        body: CompletionRequest,
        text: TextService,
        answers: Answers,
        answer_id: str,
        model: str,
        echoes: Sequence[str],
    ) -> None:
        self._body = body
        self._tokenizer = text.tokenizer
        self._answers = answers
        self._id = answer_id
        self._model = model
        self._echoes = echoes
        self._created = int(time.time())
        self._n = body.n or 1
        self._begun: set[int] = set()

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        continuous = with_usage and options is not None and options.continuous_usage_stats
        while (news := await self._answers.take()) is not None:
            choices = [self._choice(number, piece) for number, piece in news]
            usage = self._answers.usage() if continuous else None
            yield b"".join(
                event(encode(self._completion([choice], usage if with_usage else UNSET)))
                for choice in choices
                if choice.text or choice.logprobs or choice.finish_reason or choice.token_ids
            )
        if with_usage:
            yield event(encode(self._completion([], self._answers.usage())))

    async def collect(self) -> Completion:
        choices: dict[int, CompletionChoice] = {}
        while (news := await self._answers.take()) is not None:
            for number, piece in news:
                choice = self._choice(number, piece)
                if choice.index in choices:
                    _merge(choices[choice.index], choice)
                else:
                    choices[choice.index] = choice
        return self._completion([choices[index] for index in sorted(choices)], self._answers.usage())

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _choice(self, number: int, piece: Piece) -> CompletionChoice:
        index = number * self._n + piece.index
        first = index not in self._begun
        self._begun.add(index)
        choice = CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=self._logprobs(number, piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = list(piece.tokens)
        return self._with_prompt(number, choice) if first else choice

    def _with_prompt(self, number: int, choice: CompletionChoice) -> CompletionChoice:
        """What belongs in front of a choice's first piece."""
        generation = self._answers.generations[number]
        tokens = generation.request.prompt.tokens
        choice.text = self._echoes[number] + choice.text
        if self._body.return_token_ids:
            choice.prompt_token_ids = tokens
        if self._body.echo and generation.prompt_logprobs is not None:
            scored = prompt_logprobs(self._tokenizer, tokens, generation.prompt_logprobs)
            if choice.logprobs is not None:
                _extend(scored, choice.logprobs)
            choice.logprobs = scored
        return choice

    def _logprobs(self, number: int, piece: Piece) -> CompletionLogprobs | None:
        if self._body.logprobs is None or not piece.logprobs:
            return None
        before = len(self._echoes[number])
        return completion_logprobs(
            self._tokenizer, piece.logprobs, [before + offset for offset in piece.offsets]
        )


def _merge(choice: CompletionChoice, more: CompletionChoice) -> None:
    choice.text += more.text
    choice.finish_reason, choice.stop_reason = more.finish_reason, more.stop_reason
    if more.token_ids is not UNSET and choice.token_ids is not UNSET:
        choice.token_ids += more.token_ids
    if more.logprobs is not None:
        if choice.logprobs is None:
            choice.logprobs = more.logprobs
        else:
            _extend(choice.logprobs, more.logprobs)


def _extend(logprobs: CompletionLogprobs, more: CompletionLogprobs) -> None:
    logprobs.tokens += more.tokens
    logprobs.token_logprobs += more.token_logprobs
    logprobs.text_offset += more.text_offset
    if logprobs.top_logprobs is not None and more.top_logprobs is not None:
        logprobs.top_logprobs += more.top_logprobs

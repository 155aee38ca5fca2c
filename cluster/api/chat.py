"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ..sequence_text import Piece
from ..text_service import TextService
from .answers import Answers
from .errors import BadRequest
from .front import Front, encode, json_response, new_id
from .logprobs import chat_logprobs
from .schemas import ChatMessage, ChatRequest
from .sse import event
from .wire import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Usage,
)


async def create_chat_completion(front: Front, request: Request) -> Response:
    """The assistant's next message, whole or as a stream."""
    request.state.field_names = {"prompt": "messages"}
    body = await front.body(request, ChatRequest)
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
        request.state.field_names["max_tokens"] = "max_completion_tokens"
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    card = front.card(body.model)
    text = await front.router.text(card)
    params = body.sampling(
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        echo_scored=False,
    )
    tokens = await text.encode_chat(
        conversation(body.messages),
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=bool(body.add_special_tokens),
    )
    answer_id = new_id("chatcmpl")
    answers = await front.answers(request, answer_id, card, [tokens], params, body)
    writer = _Writer(body, text, answers, answer_id, card.name)
    if body.stream:
        return await front.stream(request, answers, writer.events())
    return json_response(await front.collect(request, answers, writer.collect()))


def conversation(messages: list[ChatMessage]) -> list[dict[str, object]]:
    """As chat templates take it."""
    converted = []
    for message in messages:
        fields = message.model_dump(exclude_none=True)
        # newer name of the same role, which templates do not know
        if message.role == "developer":
            fields["role"] = "system"
        fields.setdefault("content", "")
        converted.append(fields)
    return converted


class _Writer:
    def __init__(
        self, body: ChatRequest, text: TextService, answers: Answers, answer_id: str, model: str
    ) -> None:
        self._body = body
        self._tokenizer = text.tokenizer
        self._answers = answers
        self._id = answer_id
        self._model = model
        self._created = int(time.time())

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        continuous = with_usage and options is not None and options.continuous_usage_stats
        blank: Usage | UnsetType | None = None if with_usage else UNSET
        # flushed before the first token: the client learns at once that its request is being served
        yield b"".join(
            event(
                self._chunk([ChatChunkChoice(index=i, delta=ChatDelta(role="assistant", content=""))], blank)
            )
            for i in range(self._body.n or 1)
        )
        while (news := await self._answers.take()) is not None:
            usage = self._answers.usage() if continuous else blank
            yield b"".join(
                event(self._chunk([choice], usage))
                for _, piece in news
                if (choice := self._chunk_choice(piece)) is not None
            )
        if with_usage:
            yield event(self._chunk([], self._answers.usage()))

    async def collect(self) -> ChatCompletion:
        choices = [
            ChatChoice(index=index, message=ChatAnswer(content=""), logprobs=self._no_logprobs())
            for index in range(self._body.n or 1)
        ]
        tokens: list[list[int]] = [[] for _ in choices]
        while (news := await self._answers.take()) is not None:
            for _, piece in news:
                choice = choices[piece.index]
                tokens[piece.index] += piece.tokens
                choice.message.content += piece.text
                choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
                if choice.logprobs is not None:
                    choice.logprobs.content += chat_logprobs(self._tokenizer, piece.logprobs).content
        completion = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._answers.usage(),
        )
        if self._body.return_token_ids:
            completion.prompt_token_ids = self._answers.generations[0].request.prompt.tokens
            for choice, ids in zip(choices, tokens, strict=True):
                choice.token_ids = ids
        return completion

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        return encode(
            ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
        )

    def _chunk_choice(self, piece: Piece) -> ChatChunkChoice | None:
        """None where a piece has nothing for the client yet."""
        ids = self._body.return_token_ids
        if not (piece.text or piece.logprobs or piece.finish_reason or (ids and piece.tokens)):
            return None
        logprobs = chat_logprobs(self._tokenizer, piece.logprobs) if piece.logprobs else None
        return ChatChunkChoice(
            index=piece.index,
            delta=ChatDelta(content=piece.text) if piece.text else ChatDelta(),
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason if piece.finish_reason is not None else UNSET,
            token_ids=list(piece.tokens) if ids else UNSET,
        )

    def _no_logprobs(self) -> ChatLogprobs | None:
        return ChatLogprobs(content=[]) if self._body.logprobs else None

"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..text_service import TextService
from .chat import conversation
from .errors import BadRequest
from .front import Front, json_response
from .schemas import DetokenizeRequest, TokenizeRequest
from .wire import Prompt, Tokens


async def tokenize(front: Front, request: Request) -> Response:
    """The token ids of a prompt, or of a conversation as the model's chat template writes it."""
    body = await front.body(request, TokenizeRequest)
    card = front.card(body.model)
    tokens = await prompt_tokens(await front.router.text(card), request, body)
    return json_response(Tokens(tokens=tokens, count=len(tokens), max_model_len=card.max_model_len))


async def prompt_tokens(text: TextService, request: Request, body: TokenizeRequest) -> list[int]:
    """As a completion, or a chat, of the same body would have them."""
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give either prompt or messages", param="prompt")
    if body.messages is not None:
        request.state.field_names = {"prompt": "messages"}
        return await text.encode_chat(
            conversation(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            add_special_tokens=bool(body.add_special_tokens),
        )
    special = body.add_special_tokens is not False
    return await text.encode(body.prompt or "", add_special_tokens=special)


async def detokenize(front: Front, request: Request) -> Response:
    """The text of token ids."""
    body = await front.body(request, DetokenizeRequest)
    card = front.card(body.model)
    if any(token >= card.vocab_size for token in body.tokens):
        raise BadRequest(f"token ids must be below {card.vocab_size}", param="tokens")
    text = await front.router.text(card)
    return json_response(Prompt(prompt=await text.decode(body.tokens)))

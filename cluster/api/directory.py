"""GET and POST /debug/directory: which worker holds which KV blocks, as the scheduler believes."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..access.salt import cache_salt
from .front import Front, json_response
from .schemas import DirectoryRequest
from .service import ask_scheduler
from .tokens import prompt_tokens


async def show_directory(front: Front, _request: Request) -> Response:
    """Blocks per worker and tier, of all models."""
    return json_response(await ask_scheduler(front.fleet.directory(None, None)))


async def find_prompt(front: Front, request: Request) -> Response:
    """The same of one model, and how much of a prompt each of its workers holds."""
    body = await front.body(request, DirectoryRequest)
    card = front.card(body.model)
    text = await front.router.text(card)
    tokens = await prompt_tokens(text, request, body)
    # as the holder of this key would have asked for it
    prompt = await text.hash(tokens, cache_salt(request.state.grant.tenant, body.cache_salt))
    found = await ask_scheduler(front.fleet.directory(card.name, prompt.block_hashes))
    return json_response(msgspec.structs.replace(found, prompt_tokens=len(tokens)))

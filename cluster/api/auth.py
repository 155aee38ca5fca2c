"""API keys: constant-time comparison, and the tenant that a key stands for."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b

from starlette.requests import Request

from .errors import Unauthorized


def authenticator(keys: Sequence[str]) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets only holders of a key pass, or everybody where there are no keys."""
    accepted = [key.encode() for key in keys]

    async def authenticate(request: Request) -> None:
        if not accepted:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        candidate = given.strip().encode()
        # every key is compared, so that the time tells nothing of which one was nearly right
        matches = [hmac.compare_digest(candidate, key) for key in accepted]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized(
                "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key"
            )
        request.state.tenant = blake2b(candidate, digest_size=8).hexdigest()

    return authenticate


def tenant_of(request: Request, user: str | None) -> str:
    """The key's tenant; `user` counts only where there are no keys, for anybody can write it."""
    tenant: str = getattr(request.state, "tenant", "")
    return tenant or (user or "")[:256]

"""Who asks, and what for: API keys of the Authorization header, and the tenant that a key stands for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request

from ..access.keyring import Keyring
from ..access.keys import Grant
from .errors import Forbidden, Unauthorized

Check = Callable[[Request], Awaitable[None]]

EVERYBODY = Grant(admin=True)


def authenticator(keyring: Keyring, *, admin: bool = False) -> Check:
    """A dependency that lets only holders of a key pass, or everybody where there are no keys.

    admin: only of keys that may see what is not their tenant's.
    """

    async def authenticate(request: Request) -> None:
        if keyring.open:
            request.state.grant = EVERYBODY
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        grant = keyring.grant(given.strip()) if scheme.lower() == "bearer" else None
        if grant is None:
            raise Unauthorized(
                "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key"
            )
        if admin and not grant.admin:
            raise Forbidden("this needs an admin key", code="not_admin")
        request.state.grant = grant

    return authenticate


def tenant_of(grant: Grant, user: str | None) -> str:
    """The key's tenant; `user` counts only where there are no keys, for anybody can write it."""
    return grant.tenant or (user or "")[:256]

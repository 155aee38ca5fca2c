"""API keys as lines of a file: what a key may do, and its hash in place of the key itself.

    sha256:<64 hexadecimal digits> tenant=search requests_per_minute=600 tokens_per_minute=200000

Keys made here carry 256 random bits, so that nobody guesses one from its hash: no salt, no stretching. A line
that holds a bare key is understood too. Knows no HTTP and opens no file.
"""

from __future__ import annotations

import secrets
from hashlib import sha256

from pydantic import Field, ValidationError, field_validator

from decodefleet.worker.config import Frozen

PREFIX = "df-"
_SCHEME = "sha256:"
_RANDOM_BYTES = 32


class InvalidKeyLine(ValueError):
    """A line that cannot be understood; says why and never what it holds."""


class Limits(Frozen):
    """What a tenant may use; None is no limit."""

    requests_per_minute: float | None = Field(None, gt=0, description="generation requests, as a rate")
    tokens_per_minute: float | None = Field(
        None, gt=0, description="tokens of prompts and outputs, as a rate"
    )
    max_concurrent: int | None = Field(None, ge=1, description="generation requests at the same time")


class Grant(Limits):
    """What the holder of a key is allowed. Keys of one tenant share its limits."""

    tenant: str = Field("", max_length=64, pattern=r"^[A-Za-z0-9._-]*$", description="who it is")
    priority: int = Field(
        0, ge=-1000, le=1000, description="most urgent that requests may be; lower is sooner"
    )
    weight: float = Field(
        1.0, ge=0.01, le=100, description="the tenant's share, against others', when requests wait"
    )
    admin: bool = Field(False, description="whether /debug answers")

    @field_validator("admin", mode="before")
    @classmethod
    def _a_bare_word_is_true(cls, value: object) -> object:
        return True if value == "" else value


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(key: str) -> bytes:
    """By which a key is found; 32 bytes."""
    return sha256(key.encode(errors="surrogateescape")).digest()


def bare_grant(digest: bytes) -> Grant:
    """Of a key that no line describes: everything, as a tenant of its own, named by the key's hash."""
    return Grant(tenant=digest.hex()[:16], admin=True)


def to_line(key: str, grant: Grant) -> str:
    """The line by which a file knows the key."""
    words = [_SCHEME + digest_of(key).hex()]
    for name, value in grant.model_dump(exclude_defaults=True).items():
        words.append(name if value is True else f"{name}={value}")
    return " ".join(words)


def parse(line: str) -> tuple[bytes, Grant]:
    """(digest, grant). Raises InvalidKeyLine."""
    word, *attributes = line.split()
    if not word.startswith(_SCHEME):
        if attributes:
            raise InvalidKeyLine("attributes need a hashed key (sha256:…), as `decodefleet keys new` makes")
        digest = digest_of(word)
        return digest, bare_grant(digest)
    try:
        digest = bytes.fromhex(word.removeprefix(_SCHEME))
    except ValueError:
        digest = b""
    if len(digest) != sha256().digest_size:
        raise InvalidKeyLine("sha256: must be followed by 64 hexadecimal digits")
    pairs = [attribute.partition("=")[::2] for attribute in attributes]
    try:
        grant = Grant.model_validate(dict(pairs))
    except ValidationError as error:
        detail = error.errors(include_input=False, include_url=False)[0]
        raise InvalidKeyLine(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}") from None
    if not grant.tenant and not grant.admin:
        raise InvalidKeyLine("tenant= is missing")
    return digest, grant


def parse_file(text: str) -> dict[bytes, Grant]:
    """Grants by digest; empty lines and those that begin with # are skipped. Raises InvalidKeyLine."""
    grants: dict[bytes, Grant] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                digest, grant = parse(line)
            except InvalidKeyLine as error:
                raise InvalidKeyLine(f"line {number}: {error}") from None
            grants[digest] = grant
    return grants

"""From the address of a Redis to clients of it. The only module that knows the forms of such addresses.

    redis://[[user]:password@]host[:port][/db]           rediss:// with TLS
    unix://[[user]:password@]/path/to/socket[?db=N]
    redis+sentinel://[[user]:password@]host[:port],host[:port],…/service[/db]     rediss+sentinel:// with TLS

Options follow as in redis-py: `?ssl_ca_certs=/path/to/ca.pem&ssl_certfile=…&ssl_keyfile=…`. User and password
are the data servers'; those of the Sentinels are `sentinel_username` and `sentinel_password`.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import redis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.connection import SSLConnection, parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

_SENTINEL_PORT = 26379
_CONNECT_TIMEOUT_S = 2.0
_TIMEOUT_S = 5.0
_SECRETS = ("password", "sentinel_password")

# the client's annotations leave open whether answers are text or bytes, and futures or values: we know
Client = Any


class _Sentinels(NamedTuple):
    """hosts: where to ask for the service's master. options: of its connections; of those to Sentinels."""

    hosts: list[tuple[str, int]]
    service: str
    options: dict[str, Any]
    sentinel_options: dict[str, Any]


def connect(url: str) -> Client:
    """A lazily connecting client that never tries twice: retrying is the caller's, who knows what to repeat.

    With Sentinels, a connection goes to the master of the moment, and one to a server that is master no more
    fails. Raises ValueError for an address in no known form.
    """
    options = _common(AsyncRetry(NoBackoff(), 0))
    found = _sentinels(url)
    if found is None:
        return Redis.from_url(url, **options)
    sentinel = AsyncSentinel(  # type: ignore[no-untyped-call]
        found.hosts, sentinel_kwargs=options | found.sentinel_options, **(options | found.options)
    )
    return sentinel.master_for(found.service)


async def hang_up(client: Client) -> None:
    """Ends all its connections; the next command finds the server, or the master, anew."""
    for each in (client, *_asked_by(client)):
        with contextlib.suppress(redis.RedisError, OSError):
            await each.connection_pool.disconnect()


def ping(url: str) -> None:
    """For code without an event loop. Raises RedisError, OSError or ValueError where nobody answers."""
    options = _common(Retry(NoBackoff(), 0))
    found = _sentinels(url)
    if found is None:
        client = redis.Redis.from_url(url, **options)
    else:
        sentinel = Sentinel(  # type: ignore[no-untyped-call]
            found.hosts, sentinel_kwargs=options | found.sentinel_options, **(options | found.options)
        )
        client = sentinel.master_for(found.service)  # type: ignore[no-untyped-call]
    try:
        client.ping()
    finally:
        for each in (client, *_asked_by(client)):
            each.connection_pool.disconnect()


def _asked_by(client: Any) -> list[Any]:
    """Clients of the Sentinels that a client asks for its master."""
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    return [] if manager is None else manager.sentinels


def without_secrets(url: str) -> str:
    """The address as it may be shown."""
    parts = urlsplit(url)
    query = [(key, "***" if key in _SECRETS else value) for key, value in parse_qsl(parts.query)]
    netloc = parts.netloc
    if ":" in netloc.rpartition("@")[0]:
        netloc = f"***@{netloc.rpartition('@')[2]}"
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(query, safe="/*")))


def _common(retry: Any) -> dict[str, Any]:
    return {
        "protocol": 2,
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_timeout": _TIMEOUT_S,
        "retry": retry,
    }


def _sentinels(url: str) -> _Sentinels | None:
    parts = urlsplit(url)
    form = re.fullmatch(r"(rediss?)\+sentinel", parts.scheme)
    if form is None:
        return None
    credentials, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not hosts or not service:
        raise ValueError("an address of Sentinels has the form redis+sentinel://host:port,host:port/service")
    query = dict(parse_qsl(parts.query))
    own = {
        key.removeprefix("sentinel_"): query.pop(key)
        for key in ("sentinel_username", "sentinel_password")
        if key in query
    }
    # what is left is an ordinary address, but for the host
    plain = urlunsplit((form[1], f"{credentials}{at}master", f"/{db}" if db else "", urlencode(query), ""))
    options = dict(parse_url(plain))  # type: ignore[no-untyped-call]
    del options["host"]
    tls = issubclass(options.pop("connection_class", redis.Connection), SSLConnection)
    encryption = {key: value for key, value in options.items() if key.startswith("ssl_")}
    if tls:
        options["ssl"] = encryption["ssl"] = True
    return _Sentinels([_host(each) for each in hosts.split(",")], unquote(service), options, encryption | own)


def _host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is no host of a Sentinel")
    return parts.hostname, parts.port or _SENTINEL_PORT

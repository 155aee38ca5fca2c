"""Forms of addresses; what they lead to is tested against servers (`test_servers.py`)."""

import pytest
from redis.asyncio import SSLConnection, UnixDomainSocketConnection

from decodefleet.cluster.directory.connection import connect, without_secrets


def options_of(url: str) -> dict:
    return connect(url).connection_pool.connection_kwargs


def test_one_server():
    pool = connect("redis://me:s%40cret@host:7000/3").connection_pool
    expected = {"username": "me", "password": "s@cret", "host": "host", "port": 7000, "db": 3}
    assert expected.items() <= pool.connection_kwargs.items()
    # whoever calls repeats, not the client
    assert pool.connection_kwargs["retry"].get_retries() == 0
    assert pool.connection_kwargs["socket_timeout"] > 0


def test_unix_socket():
    pool = connect("unix://:secret@/run/redis.sock?db=2").connection_pool
    assert pool.connection_class is UnixDomainSocketConnection
    assert {
        "path": "/run/redis.sock",
        "password": "secret",
        "db": 2,
    }.items() <= pool.connection_kwargs.items()


def test_tls():
    pool = connect("rediss://host:7000?ssl_ca_certs=/etc/ca.pem").connection_pool
    assert pool.connection_class is SSLConnection
    assert pool.connection_kwargs["ssl_ca_certs"] == "/etc/ca.pem"


def test_sentinels():
    pool = connect(
        "redis+sentinel://me:secret@a:7000,b,[::1]:7001/main/2?sentinel_password=other"
    ).connection_pool
    manager = pool.sentinel_manager
    asked = [each.connection_pool.connection_kwargs for each in manager.sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("a", 7000), ("b", 26379), ("::1", 7001)]
    assert {each["password"] for each in asked} == {"other"}
    assert pool.service_name == "main"
    assert {"username": "me", "password": "secret", "db": 2}.items() <= pool.connection_kwargs.items()


def test_sentinels_with_tls():
    pool = connect("rediss+sentinel://a/main?ssl_ca_certs=/etc/ca.pem").connection_pool
    assert issubclass(pool.connection_class, SSLConnection)
    (sentinel,) = pool.sentinel_manager.sentinels
    assert sentinel.connection_pool.connection_class is SSLConnection
    for kwargs in (pool.connection_kwargs, sentinel.connection_pool.connection_kwargs):
        assert kwargs["ssl_ca_certs"] == "/etc/ca.pem"


@pytest.mark.parametrize("url", ["http://host", "redis+sentinel://host", "redis+sentinel:///main", "host:1"])
def test_what_is_no_address(url):
    with pytest.raises(ValueError, match=r"."):
        connect(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host/1", "redis://host/1"),
        ("redis://me:s@host/1", "redis://***@host/1"),
        ("redis://:s@host/1", "redis://***@host/1"),
        ("unix://:s@/a/b?db=1", "unix://***@/a/b?db=1"),
        ("redis://host?password=s", "redis://host?password=***"),
        (
            "redis+sentinel://:s@a:1,b:2/main?sentinel_password=s&ssl_ca_certs=/a",
            "redis+sentinel://***@a:1,b:2/main?sentinel_password=***&ssl_ca_certs=/a",
        ),
    ],
)
def test_secrets_are_not_shown(url, shown):
    assert without_secrets(url) == shown

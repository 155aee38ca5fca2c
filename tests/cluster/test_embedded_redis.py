"""The private Redis: lives, comes back, and dies with its owner."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis
from waiting import until

from decodefleet.cluster import embedded_redis
from decodefleet.cluster.embedded_redis import EmbeddedRedis, RedisUnavailable, check_redis


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_serves_and_leaves_nothing():
    with EmbeddedRedis(maxmemory_mib=32) as server:
        pid = server.pid
        client = redis.Redis.from_url(server.url)
        client.set("a", 1)
        assert client.get("a") == b"1"
        assert client.config_get("maxmemory")["maxmemory"] == str(32 << 20)
        assert client.config_get("save")["save"] == ""
        assert os.getpgid(pid) != os.getpgid(0)
        client.close()
        folder = Path(server.url.removeprefix("unix://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not psutil.pid_exists(pid)
    assert not folder.exists()
    server.stop()


def test_comes_back_after_a_kill():
    with EmbeddedRedis() as server:
        first, url = server.pid, server.url
        os.kill(first, signal.SIGKILL)
        until(lambda: server.pid not in (first, None))

        def answers() -> bool:
            try:
                check_redis(url)
            except RedisUnavailable:
                return False
            return True

        until(answers)


def test_dies_with_its_owner():
    program = (
        "import sys, time, threading\n"
        "from decodefleet.cluster.embedded_redis import EmbeddedRedis\n"
        "server = EmbeddedRedis()\n"
        # the thread that starts it ends at once; the server must not
        "thread = threading.Thread(target=server.start); thread.start(); thread.join()\n"
        "print(server.pid, flush=True); time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    folder = Path(psutil.Process(pid).cwd())
    assert psutil.pid_exists(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: is_gone(pid))
    # the next start sweeps up, but leaves alone what is young and may be in the making
    with EmbeddedRedis():
        assert folder.exists()
    os.utime(folder, (0, 0))
    with EmbeddedRedis():
        assert not folder.exists()


def test_folder_in_use_is_not_swept():
    with EmbeddedRedis() as first:
        folder = Path(first.url.removeprefix("unix://")).parent
        os.utime(folder, (0, 0))
        with EmbeddedRedis():
            assert folder.exists()
        check_redis(first.url)


def test_server_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(embedded_redis, "_START_S", 0.5)
    server = EmbeddedRedis(maxmemory_mib=-1)
    with pytest.raises(RedisUnavailable, match=r"does not start: .*maxmemory"):
        server.start()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "unix:///nowhere/s", "http://127.0.0.1", "nonsense"])
def test_bad_url_is_a_clear_error(url):
    with pytest.raises(RedisUnavailable, match=r"does not answer: ."):
        check_redis(url)


def test_password_is_not_shown():
    with pytest.raises(RedisUnavailable) as caught:
        check_redis("redis://user:hunter2@127.0.0.1:1/0")
    assert "hunter2" not in str(caught.value)
    assert "***@127.0.0.1:1" in str(caught.value)

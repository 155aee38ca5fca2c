"""Nothing that was started stays, whoever is killed: tried with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import until

from decodefleet.cluster import processes
from decodefleet.cluster.processes import end_processes, free_ports, port_is_free

# a child that starts a grandchild in a session of its own, orphaned at once: what supervisors leave behind
PROGRAM = """
import os, pathlib, signal, subprocess, sys, time
from decodefleet.cluster.processes import Guardian

folder = pathlib.Path(sys.argv[1])

def main():
    command = ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"]
    pid = subprocess.run(command, capture_output=True, text=True).stdout
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(5))
    (folder / "pids").write_text(f"{os.getpid()} {pid}")
    if sys.argv[2] == "return":
        return 3
    time.sleep(1000)

sys.exit(Guardian().run(main))
"""


def start(folder: Path, what: str = "wait") -> tuple[subprocess.Popen[bytes], list[int]]:
    """The guardian, and the pids of its child and of the orphan."""
    guardian = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), what], start_new_session=True)
    until(lambda: (folder / "pids").exists() and len((folder / "pids").read_text().split()) == 2)
    return guardian, [int(pid) for pid in (folder / "pids").read_text().split()]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_childs_exit_code_is_returned_and_its_orphans_end(tmp_path: Path) -> None:
    guardian, pids = start(tmp_path, "return")
    assert guardian.wait() == 3
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 5), (signal.SIGTERM, 7), (signal.SIGHUP, 7)])
def test_signals_reach_the_child_once(signum: int, code: int, tmp_path: Path) -> None:
    guardian, pids = start(tmp_path)
    # as a terminal does it: to the whole foreground group, of which the child is no part
    os.killpg(guardian.pid, signum)
    assert guardian.wait() == code
    assert all(gone(pid) for pid in pids)


def test_a_killed_child_leaves_nothing(tmp_path: Path) -> None:
    guardian, pids = start(tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    assert guardian.wait() == 128 + signal.SIGKILL
    assert all(gone(pid) for pid in pids)


def test_a_killed_guardian_ends_the_child(tmp_path: Path) -> None:
    guardian, pids = start(tmp_path)
    guardian.kill()
    guardian.wait()
    until(lambda: all(gone(pid) for pid in pids))


def test_what_ignores_term_is_killed() -> None:
    command = ["sh", "-c", "trap '' TERM; echo; while :; do sleep 0.1; done"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert end_processes([psutil.Process(process.pid)], grace_s=0.1) == 1
        assert not psutil.pid_exists(process.pid)


def test_free_ports_are_distinct_and_free() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    assert all(port_is_free("127.0.0.1", port) for port in ports)


def test_free_ports_are_not_given_to_others_meanwhile() -> None:
    lowest, highest = (int(word) for word in processes.GIVEN_PORTS.read_text().split())
    if lowest <= processes.OWN_PORTS[0] and processes.OWN_PORTS[-1] <= highest:
        pytest.skip("this system gives all of our ports away")
    assert not [port for port in free_ports(50) if lowest <= port <= highest]


def test_a_port_in_use_is_no_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    used, free = free_ports(2)
    monkeypatch.setattr(processes, "OWN_PORTS", (used, free))
    with socket.create_server(("127.0.0.1", used)):
        # the second is one that the system gives
        assert free in (found := free_ports(2))
        assert used not in found


def test_ports_are_free_where_the_system_gives_all_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GIVEN_PORTS", tmp_path / "range")
    (tmp_path / "range").write_text("1024\t65535\n")
    assert all(port_is_free("127.0.0.1", port) for port in free_ports(4))


def test_ports_of_another_machine_are_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        free_ports(1, "203.0.113.1")


def test_a_port_that_is_listened_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not port_is_free("127.0.0.1", server.getsockname()[1])


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        port_is_free("203.0.113.1", 8000)


DEAF = """
import hashlib, signal
from decodefleet.cluster.processes import tell_of_signal

# says nothing: it is called where the signal comes before the native code, and never while that runs
signal.signal(signal.SIGINT, lambda *_: None)
tell_of_signal(lambda: print("told", flush=True))
# ends us where nobody is told
signal.alarm(60)
print("working", flush=True)
# native code that looks at no signal, for a quarter of an hour or more
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


def test_a_signal_is_told_while_native_code_runs() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as deaf:
        assert deaf.stdout is not None
        try:
            assert deaf.stdout.readline() == "working\n"
            deaf.send_signal(signal.SIGINT)
            assert deaf.stdout.readline() == "told\n"
        finally:
            deaf.kill()

"""Process hygiene: nothing that we start outlives us, whoever of us dies, and by whatever signal.

Linux only (prctl). Knows nothing of what the processes do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 2.0


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Sends us `signum` when the thread that forked us ends; at once where `parent` is gone already."""
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """From now on, descendants whose parent dies become our children instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def run_guarded(main: Callable[[], int]) -> int:
    """Runs `main` in a child with a session of its own and returns its exit code, leaving no descendant.

    The caller becomes the guardian: it stays in the terminal's foreground group, passes SIGINT and SIGTERM
    on to the child only (so that one Ctrl-C does not reach every process of the tree at once), and ends
    whatever the child leaves behind where the child was killed. Where the guardian is killed, the child gets
    SIGTERM and stops as usual. Call it before threads are started.
    """
    guardian = os.getpid()
    adopt_orphans()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _run_child(main, guardian)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: _pass_on(child, number))
    code = _wait_for(child)
    end_descendants()
    return code


def tell_of_signal(tell: Callable[[], None]) -> None:
    """Calls `tell` in a thread when the first handled signal comes: at once, whereas Python runs handlers
    only when the main thread is back from whatever native code it is in.
    """
    waiting, telling = socket.socketpair()
    telling.setblocking(False)
    # whoever is told has no time to read what else comes
    signal.set_wakeup_fd(telling.detach(), warn_on_full_buffer=False)

    def wait() -> None:
        with waiting:
            if waiting.recv(1):
                tell()

    threading.Thread(target=wait, name="signals", daemon=True).start()


def end_descendants(grace_s: float = GRACE_S) -> int:
    """TERM, then KILL, for every descendant, by pid; returns how many there were."""
    count = 0
    # again, for what was forked meanwhile or was adopted when its parent died
    while found := psutil.Process().children(recursive=True):
        count += end_processes(found, grace_s)
    return count


def end_processes(processes: Iterable[psutil.Process], grace_s: float = GRACE_S) -> int:
    """TERM now, KILL after `grace_s`; returns when all are gone."""
    remaining = list(processes)
    count = len(remaining)
    for ending in (psutil.Process.terminate, psutil.Process.kill):
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                ending(process)
        _, remaining = psutil.wait_procs(remaining, timeout=grace_s)
    return count


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports that are free now."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind((host, 0))
            ports.append(int(listener.getsockname()[1]))
        return ports


def port_is_free(host: str, port: int) -> bool:
    """Whether nobody listens there; raises OSError where we may not, or the address is not ours."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def _run_child(main: Callable[[], int], guardian: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        adopt_orphans()
        die_with_parent(guardian, signal.SIGTERM)
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        end_descendants()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _pass_on(child: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM if signum == signal.SIGHUP else signum)


def _wait_for(child: int) -> int:
    """The child's exit code (128 + signal where one ended it); reaps adopted orphans meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")

"""Process hygiene: nothing that we start outlives us, whoever of us dies, and by whatever signal.

Linux only (prctl). Knows nothing of what the processes do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 2.0
GUARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_S = 0.05
# where the system takes ports for whoever names none: listeners, and each connection that goes out
GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# above those that Ray gives its workers, below those of its replicas, and of Kubernetes' nodes
OWN_PORTS = range(20000, 30000)
ANY_PORT = 0


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Sends us `signum` when the thread that forked us ends; at once where `parent` is gone already."""
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """From now on, descendants whose parent dies become our children instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


class Guardian:
    """Runs functions in children with a session of their own, one after the other, leaving no descendant.

    It stays in the terminal's foreground group, passes SIGINT and SIGTERM on to the child only (so that one
    Ctrl-C does not reach every process of the tree at once), and ends whatever a child leaves behind that was
    killed. Where the guardian is killed, the child gets SIGTERM and stops as usual. Make it before threads
    are started, once.

    is_told: whether a signal has come, be it while no child was there.
    """

    def __init__(self) -> None:
        self.is_told = False
        self._child: int | None = None
        adopt_orphans()
        for signum in GUARDED_SIGNALS:
            signal.signal(signum, self._on_signal)

    def run(self, main: Callable[[], int]) -> int:
        """The exit code of `main`; 128 + signal where one ended it, be it before it began.

        Raises OSError where no child can be forked.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        guardian = os.getpid()
        # one that comes between is for the child, which has no handlers yet, or for us, who know no child yet
        signal.pthread_sigmask(signal.SIG_BLOCK, GUARDED_SIGNALS)
        try:
            if self.is_told:
                return 128 + signal.SIGTERM
            child = os.fork()
            if child == 0:
                _run_child(main, guardian)
            self._child = child
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARDED_SIGNALS)
        code = _wait_for(child)
        self._child = None
        end_descendants()
        return code

    def pause(self, limit_s: float) -> bool:
        """Waits, but no longer than until a signal comes; answers whether none has."""
        give_up = time.monotonic() + limit_s
        while not self.is_told and (left_s := give_up - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))
        return not self.is_told

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.is_told = True
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGTERM if signum == signal.SIGHUP else signum)


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
    """Distinct ports that are free now, and that nobody gets who asks the system for any: whoever is told one
    may take seconds until he listens there, and what starts meanwhile opens dozens.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in _ports_to_try():
            listener = stack.enter_context(socket.socket())
            try:
                listener.bind((host, port))
            except OSError as error:
                if port == ANY_PORT or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                listener.close()
                continue
            ports.append(int(listener.getsockname()[1]))
            if len(ports) == count:
                break
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
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARDED_SIGNALS)
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


def _wait_for(child: int) -> int:
    """The child's exit code (128 + signal where one ended it); reaps adopted orphans meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _ports_to_try() -> Iterator[int]:
    """In any order, so that two who look at once do not find the same; endless."""
    lowest, highest = (int(word) for word in GIVEN_PORTS.read_text().split())
    own = [port for port in OWN_PORTS if not lowest <= port <= highest]
    yield from random.SystemRandom().sample(own, len(own))
    yield from itertools.repeat(ANY_PORT)


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")

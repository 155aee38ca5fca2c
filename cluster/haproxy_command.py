"""Stands between Serve and HAProxy: Serve writes a configuration and runs this, which becomes HAProxy.

Serve's own configuration turns 502, 503 and 504 into a bare 500, answers 404 while it knows no router, shows
statistics to every network, speaks no TLS, waits an hour for a request's head, starts no HAProxy where fewer
files may be open than its connections need, and lets it end with its manager, all streams with it. None of
that is an option of Serve's. Run as a script by `python -I -S`, for each start and reload: standard library
only, nothing of ours.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# each has a file in the folder of pages, a whole HTTP response
STATUSES = (502, 503, 504)
# for a request's head: who sends it slowly holds one of HAProxy's few thousand connections
HEAD_S = 30
# listeners, statistics, logs, and those of a predecessor
RESERVED_FILES = 200
# in the same folder: certificate and key, where the HTTP port speaks TLS
CERTIFICATE = "certificate.pem"

_ERROR_FILE = re.compile(r"^ *errorfile \d+ .*\n", re.MULTILINE)
_BIND = re.compile(r"^frontend http_frontend\n *bind (\S+)", re.MULTILINE)
_UNKNOWN_PATH = re.compile(r"^( *)http-request return status 404 .*Ping http.*$", re.MULTILINE)
_FRONTEND = re.compile(r"^frontend http_frontend\n *bind (\S+):\d+$", re.MULTILINE)
_STATISTICS = re.compile(r"^(listen stats\n *bind )\*:", re.MULTILINE)
_ADMIN = re.compile(r"^ *stats socket (\S+) .*expose-fd listeners", re.MULTILINE)
# Serve's comments speak of it too
_ROUTERS = re.compile(r"^ *use_backend ", re.MULTILINE)
_CONNECTIONS = re.compile(r"^(global\n(?:(?!defaults).*\n)*? +maxconn )(\d+)", re.MULTILINE)
_METRICS = re.compile(r"^(frontend prometheus\n *bind ):", re.MULTILINE)


def main(arguments: Sequence[str]) -> None:
    """arguments: HAProxy's binary, the folder of pages, then what Serve calls HAProxy with."""
    binary, pages, *options = arguments
    file = Path(options[options.index("-f") + 1])
    text = impatient(narrowed(with_pages(file.read_text(), Path(pages))))
    text = fitting(text, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    if (certificate := Path(pages, CERTIFICATE)).exists():
        text = with_tls(text, certificate)
    first = "-sf" not in options
    text = remembered(text, file, first)
    if first and (orphans := list(orphans_at(frontends(text)))):
        options += [*listeners_of_old(text), "-sf", *(str(pid) for pid in orphans)]
    file.write_text(text)
    # Ray ends a dead actor's process group: out of it, and HAProxy serves on until a new manager has another
    # take over
    os.setpgid(0, 0)
    # -dS, no splice(): with it HAProxy misses that a client has gone whose body came in a packet of its own,
    # as most clients send it, until there is something to answer. Queued requests of nobody would keep their
    # places, and unstreamed ones be computed to their ends.
    os.execv(binary, [binary, "-dS", *options])


def remembered(text: str, file: Path, first: bool) -> str:
    """The configuration, or the last one with routers while a new manager has not heard of any.

    A manager that replaces a killed one starts without routers, though its predecessor knew some, and reloads
    for whatever Serve tells it first, which need not be routers. Once it has heard of some, none means none.
    """
    last, heard = file.with_suffix(".last"), file.with_suffix(".heard")
    if first:
        heard.unlink(missing_ok=True)
    if has_routers(text):
        whole = file.with_suffix(".new")
        whole.write_text(text)
        whole.replace(last)
        heard.touch()
    elif last.exists() and not heard.exists():
        return last.read_text()
    return text


def with_pages(text: str, pages: Path) -> str:
    """The configuration with our answers in place of Serve's. Left as it is where it has no such places."""
    lines = "".join(f"    errorfile {status} {pages / str(status)}.http\n" for status in STATUSES)
    text, found = _ERROR_FILE.subn("", text)
    if found:
        text = text.replace("defaults\n", f"defaults\n{lines}", 1)
    # only while the application is not there: it has the prefix /, so every path is known afterwards
    return _UNKNOWN_PATH.sub(r"\1http-request deny deny_status 503", text)


def narrowed(text: str) -> str:
    """The configuration with its page of statistics on loopback, and its metrics where the HTTP port is."""
    served = _FRONTEND.search(text)
    host = served[1] if served is not None else "127.0.0.1"
    text = _STATISTICS.sub(r"\g<1>127.0.0.1:", text)
    return _METRICS.sub(lambda found: f"{found[1]}{host}:", text)


def impatient(text: str) -> str:
    """The configuration with a time for a request's head, where it has none; bodies are the routers'."""
    if "timeout http-request" in text:
        return text
    return text.replace("defaults\n", f"defaults\n    timeout http-request {HEAD_S}s\n", 1)


def fitting(text: str, files: int) -> str:
    """The configuration with no more connections than `files`, the hard limit, has room for.

    HAProxy reserves two and a half for each, and does not start where it cannot have them.
    """
    found = _CONNECTIONS.search(text)
    most = (files - RESERVED_FILES) * 2 // 5
    if found is None or files == resource.RLIM_INFINITY or int(found[2]) <= most:
        return text
    print(f"{files} open files are allowed: {most} connections instead of {found[2]}", file=sys.stderr)
    return text[: found.start(2)] + str(most) + text[found.end(2) :]


def with_tls(text: str, certificate: Path) -> str:
    """The configuration with TLS on the port of the API; that of metrics stays as it is.

    HTTP/1.1 only, as without TLS. Exits where it finds no such port: nothing may be served in the clear then.
    """
    tls = f" ssl crt {certificate} ssl-min-ver TLSv1.2 alpn http/1.1"
    text, found = _FRONTEND.subn(lambda bind: bind[0] + tls, text)
    if not found:
        sys.exit("no frontend of HTTP to speak TLS on")
    return text


def has_routers(text: str) -> bool:
    return _ROUTERS.search(text) is not None


def frontends(text: str) -> set[str]:
    """Where a configuration listens for clients."""
    return set(_BIND.findall(text))


def listeners_of_old(text: str) -> list[str]:
    """The option that takes listening sockets over, where somebody has them, so that nobody is refused."""
    if (found := _ADMIN.search(text)) is None:
        return []
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(found[1])
        except OSError:
            return []
    return ["-x", found[1]]


def orphans_at(addresses: set[str]) -> Iterator[int]:
    """Those that listen at one of the addresses too and have no manager any more."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "-dS" not in words or not words[0].endswith("haproxy"):
                continue
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            managed = Path("/proc", parent, "cmdline").read_bytes().startswith(b"ray::")
            config = Path(words[words.index("-f") + 1]).read_text()
        except (OSError, ValueError, IndexError):
            # gone meanwhile, or somebody else's with another command line
            continue
        if not managed and addresses & frontends(config):
            yield int(entry.name)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Whether the servers started on this machine are ready: what the health check of a container asks.

Each server leaves its address in the folder of its run, whatever port, host and certificate it was told. Run
as a module every few seconds, so it needs the standard library only.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

RUNS = Path("/tmp")
PREFIX = "decodefleet-"
ADDRESS = "address"
TIMEOUT_S = 4.0


def leave_address(run: Path, url: str) -> None:
    """run: the folder of a server, below RUNS, its name beginning with PREFIX."""
    (run / ADDRESS).write_text(url)


def forget_address(run: Path) -> None:
    """For a server that has ended and leaves its logs."""
    (run / ADDRESS).unlink(missing_ok=True)


def addresses() -> set[str]:
    """Of our user's servers; others' could be anything."""
    found = set()
    for file in RUNS.glob(f"{PREFIX}*/{ADDRESS}"):
        try:
            if file.stat().st_uid == os.getuid():
                found.add(file.read_text())
        except OSError:
            # it ends in this moment
            continue
    return found


def trouble(url: str) -> str | None:
    """Why the server at `url`, on this machine, is not ready; None where it is."""
    # a proxy named in the environment is for reaching other machines
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified())
    )
    try:
        direct.open(f"{url}/ready", timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        return f"answers {error.code}"
    except urllib.error.URLError as error:
        return f"does not answer: {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return f"does not answer: {error}"
    return None


def unverified() -> ssl.SSLContext:
    """For asking ourselves, sending nothing: a certificate need not name the loopback."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def main() -> int:
    """Says of each server how it is; 0 where there are some and all are ready."""
    troubles = {url: trouble(url) for url in sorted(addresses())}
    for url, what in troubles.items():
        print(f"{url} {what or 'is ready'}")
    if not troubles:
        print("no server was started here")
    return 0 if troubles and not any(troubles.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

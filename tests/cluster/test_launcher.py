"""What `decodefleet serve` refuses before it has started Ray; the rest is `tests/e2e/test_serve.py`."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

from decodefleet.cluster.processes import free_ports

COMMAND = [sys.executable, "-c", "from decodefleet.cluster.cli import main; main()", "serve", "--fake"]


def refused(*options: str) -> str:
    """What is printed by a start that fails."""
    port = str(free_ports(1)[0])
    done = subprocess.run(
        [*COMMAND, "--port", port, *options], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed
    for folder in re.findall(r"logs: (\S+)", printed):
        assert not Path(folder).exists()
    return printed


def test_a_port_in_use_is_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        printed = refused("--port", str(port))
    assert f"{port} is in use" in printed
    assert "logs" not in printed


def test_an_address_of_another_machine_is_refused() -> None:
    assert "cannot listen on 203.0.113.1" in refused("--host", "203.0.113.1")


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "absent" in refused(str(tmp_path / "absent"))


def test_a_redis_that_does_not_answer_is_named(smollm2: Path) -> None:
    printed = refused(str(smollm2), "--redis-url", "redis://:sesame@127.0.0.1:1")
    assert "127.0.0.1:1" in printed
    assert "sesame" not in printed


def test_an_option_that_does_not_exist_is_named(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("prot: 1\n")
    said = refused("--config", str(file))
    # the path before it decides where lines break
    assert "did you mean port" in " ".join(said.split())

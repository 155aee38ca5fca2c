"""Lines of a rank's log in either form, as another process reads them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from decodefleet.worker.logs import message_of

SCRIPT = """
import logging, sys
from decodefleet.worker.logs import set_up_logging
set_up_logging("info", sys.argv[1])
log = logging.getLogger("decodefleet.test")
log.debug("not this")
log.info("one\\nforged 2026-01-01 ERROR x: %s", "two")
try:
    raise ValueError("broken")
except ValueError:
    log.exception("it failed")
"""


def lines_of(form: str) -> list[str]:
    ended = subprocess.run([sys.executable, "-c", SCRIPT, form], capture_output=True, text=True, check=True)
    return ended.stderr.splitlines()


def test_each_line_of_json_is_one_record() -> None:
    first, second = map(json.loads, lines_of("json"))
    assert first["message"] == "one\nforged 2026-01-01 ERROR x: two"
    assert (first["levelname"], first["logger"]) == ("INFO", "decodefleet.test")
    assert second["message"] == "it failed"
    assert "ValueError: broken" in second["exc_text"]


def test_text_is_for_people() -> None:
    lines = lines_of("text")
    assert "INFO decodefleet.test: one" in lines[0]
    assert lines[-1] == "ValueError: broken"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"message": "why", "levelname": "ERROR"}', "why"),
        ("plain", "plain"),
        ("3", "3"),
        ("", ""),
        ("{}", "{}"),
    ],
)
def test_what_a_line_says(line: str, message: str) -> None:
    assert message_of(line) == message

"""What the Dockerfile says, by instruction."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def instructions() -> Iterator[tuple[str, str]]:
    """(instruction, rest) of each, without comments, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word, rest.strip()


def of(word: str) -> list[str]:
    return [rest for found, rest in instructions() if found == word]


def image_environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in of("ENV") for pair in shlex.split(rest))

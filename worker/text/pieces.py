"""What bytes a token stands for, derived from a tokenizer's decoder.

Decoders of language models give each token its bytes independently of its neighbours, save for spaces at
the start of a text. With the bytes at hand, streaming is concatenation: no prefix is ever decoded twice. A
decoder that does not work this way is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..assets.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Pieces:
    """to_bytes: from a token as the vocabulary has it. strip_start: spaces dropped at the start of a text."""

    to_bytes: Callable[[str], bytes]
    strip_start: int = 0


def pieces_of(decoder: bytes | None) -> Pieces:
    """Read a decoder, given as the JSON that `tokenizers` pickles it to. Raises ModelError."""
    state = json.loads(decoder) if decoder else None
    steps: list[dict[str, Any]] = _steps(state)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Pieces(_byte_level)
    spaces: list[str] = []
    byte_fallback, strip_start = False, 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": mark}, "content": " "}:
                spaces.append(mark)
            case {"type": "Metaspace", "replacement": mark}:
                spaces.append(mark)
                strip_start = 0 if step.get("prepend_scheme") == "never" else 1
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                strip_start = start
            case _:
                raise _unsupported(step)
    if not steps:
        raise _unsupported(state)
    return Pieces(_spaced(spaces, byte_fallback), strip_start)


def _steps(state: Any) -> list[dict[str, Any]]:
    if state is None:
        return []
    if state["type"] == "Sequence":
        return [inner for step in state["decoders"] for inner in _steps(step)]
    return [state]


def _unsupported(state: Any) -> ModelError:
    return ModelError(
        f"tokenizer.json has a decoder that cannot be streamed: {json.dumps(state)[:200]}.",
        "Byte-level and sentencepiece-like tokenizers are supported.",
    )


def _spaced(spaces: list[str], byte_fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for mark in spaces:
            token = token.replace(mark, " ")
        return token.encode()

    return to_bytes


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        # an added token with characters outside the alphabet stands for itself
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes are themselves, the others are moved up to U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(moved)}


_BYTE_OF = _byte_alphabet()

"""A sentencepiece tokenizer as a GGUF describes it, by tokens and scores, rebuilt as merges.

Sentencepiece joins the two neighbours that make the token of the highest score; a list of merges in the order
of their results' scores does the same. What has no token is spelled in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from tokenizers import Tokenizer, decoders, models, normalizers

_SPACE = "▁"


class TokenType(IntEnum):
    """As GGUF numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def sentencepiece_tokenizer(
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    *,
    unknown: int | None,
    space_prefix: bool,
) -> Tokenizer:
    """Without added tokens; each list by token id. unknown: id of what stands for bytes that have no token.

    space_prefix: a text is read as if a space stood before it.
    """
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(tokens, types, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    prefixed = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
    tokenizer.normalizer = prefixed if space_prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return tokenizer


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best results first, then longest left halves."""
    scored = {
        token: score
        for token, type_, score in zip(tokens, types, scores, strict=True)
        if type_ == TokenType.NORMAL
    }
    ways = [
        (score, split, token)
        for token, score in scored.items()
        for split in range(1, len(token))
        if token[:split] in scored and token[split:] in scored
    ]
    ways.sort(key=lambda way: way[:2], reverse=True)
    return [(token[:split], token[split:]) for _, split, token in ways]

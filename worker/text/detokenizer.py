"""Token ids to text as they come, in linear time: only characters that are complete are ever given out."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .tokenizer import Tokenizer, strip_spaces

# more than a UTF-8 character has bytes
_CONTEXT_TOKENS = 8


class IncrementalDetokenizer:
    """One sequence's text. Everything pushed and finished, joined, is `Tokenizer.decode` of all ids.

    A part of a character waits for its rest; bytes become U+FFFD only when nothing that follows could
    complete them.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> None:
        """after: the ids that the text continues. They give out nothing themselves, but then a leading space
        is a space, and a character that they leave incomplete can be completed.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = 0 if any(map(self._bytes_of, after)) else tokenizer.strip_start
        for token in after[-_CONTEXT_TOKENS:]:
            self._utf8.decode(self._bytes_of(token))

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become final with these ids."""
        data = b"".join(map(self._bytes_of, ids))
        if self._strip:
            data, self._strip = strip_spaces(data, self._strip)
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD where the ids ended inside a character."""
        return self._utf8.decode(b"", final=True)

    @property
    def incomplete(self) -> bool:
        """Whether bytes of an unfinished character are held."""
        return bool(self._utf8.getstate()[0])

    def _bytes_of(self, token: int) -> bytes:
        return b"" if token in self._skipped else self._tokenizer.token_bytes(token)

"""Text to token ids and back, over the `tokenizers` library. Knows nothing of requests or streams."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Backend

from ..assets.checkpoint import CONFIG, read_config
from ..assets.errors import ModelError
from .chat import ChatTemplate, Message, load_templates
from .pieces import pieces_of

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer. Thread-safe; `encode` releases the GIL, so it may run in a thread pool.

    special_ids: tokens that `skip_special_tokens` leaves out of decoded text.
    eos_token_ids: every token that ends a generation. bos_token_id: None where the model has none.
    """

    def __init__(
        self,
        backend: _Backend,
        *,
        named: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        eos_token_ids: Sequence[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        """named: special tokens by role (`bos_token`, …), given to chat templates too.
        add_bos: None leaves it to the backend's post-processor.
        eos_token_ids: in addition to the named one.
        """
        # a tokenizer.json may carry the settings of its training run; a prompt is never cut or padded
        backend.no_truncation()
        backend.no_padding()
        named = named or {}
        self._backend = backend
        self._add_bos = add_bos
        self._pieces = pieces_of(backend.decoder.__getstate__() if backend.decoder else None)
        self._bytes: dict[int, bytes] = {}
        self._chat = ChatTemplate(templates or {}, named)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.bos_token_id = self._id_of(named.get("bos_token"))
        eos = self._id_of(named.get("eos_token"))
        self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *(() if eos is None else (eos,)))))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, chat templates and end tokens. Raises ModelError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{path} is missing.",
                "Fetch it, or make one where the original tokenizer is: "
                "`AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`.",
            )
        try:
            backend = _Backend.from_file(str(path))
        # the library raises plain Exception
        except Exception as error:
            raise ModelError(f"{path} cannot be read: {error}.", "Fetch this file again.") from error
        config = _read_config(folder)
        return cls(
            backend,
            named=_named_tokens(config),
            add_bos=config.get("add_bos_token"),
            eos_token_ids=read_config(folder).eos_token_ids if (folder / CONFIG).is_file() else (),
            templates=load_templates(folder, config.get("chat_template")),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the whole text. Raises UnicodeEncodeError for a lone surrogate.

        add_special_tokens: put BOS first where the model wants it. False for rendered chat templates,
        which write it themselves.
        """
        own_bos = self._add_bos is not None and add_special_tokens
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens and not own_bos).ids
        except TypeError:
            # the library's way to refuse surrogates
            text.encode()
            raise
        if not own_bos:
            return ids
        return [self.bos_token_id, *ids] if self._add_bos and self.bos_token_id is not None else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD. Spaces are never tidied up.

        The same as the library's, but for invalid runs of byte-fallback tokens: there the library replaces
        the whole run, valid characters included.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(i) for i in ids if i not in skipped)
        return strip_spaces(data, self.strip_start)[0].decode("utf-8", "replace")

    @property
    def strip_start(self) -> int:
        """Spaces that decoding drops at the start of a text."""
        return self._pieces.strip_start

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes that a token adds to a text; empty for an id outside the vocabulary."""
        data = self._bytes.get(token)
        if data is None:
            text = self._backend.id_to_token(token)
            data = self._bytes[token] = b"" if text is None else self._pieces.to_bytes(text)
        return data

    def token_text(self, token: int) -> str:
        """A token on its own as text; U+FFFD stands for parts of characters."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as the model was trained to see it. Raises ChatTemplateError.

        Encode the result with `add_special_tokens=False`. variables: further names that the template
        knows; they cannot replace the arguments.
        """
        return self._chat.render(messages, tools, add_generation_prompt, variables)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


def has_chat_template(folder: Path) -> bool:
    """Whether the model in `folder` can chat. Raises ModelError for a broken tokenizer_config.json."""
    return bool(load_templates(folder, _read_config(folder).get("chat_template")))


def strip_spaces(data: bytes, count: int) -> tuple[bytes, int]:
    """Drop up to `count` leading spaces; gives the rest, and how many may be dropped from what follows it."""
    spaces = min(count, len(data) - len(data.lstrip(b" ")))
    rest = data[spaces:]
    return rest, 0 if rest else count - spaces


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}.", "Fetch this file again.") from error
    return config if isinstance(config, dict) else {}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; written as text, or as an object with its `content`."""
    fields = {name: config.get(name) for name in _NAMED}
    texts = {name: f.get("content") if isinstance(f, dict) else f for name, f in fields.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}

"""The tokenizer inside a GGUF, rebuilt as tokenizer.json and tokenizer_config.json.

Built with `tokenizers` alone. How a byte-level one splits text before the merges is named by the GGUF
(`tokenizer.ggml.pre`) and looked up here; a split that is not in the table is an error, since a near one
would give other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from .errors import ModelError
from .gguf_sentencepiece import TokenType, sentencepiece_tokenizer

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_USE_ORIGINAL = "Serve the model's original folder, with its tokenizer.json, instead."
# chat models end a turn with these even where the GGUF names only the end of text
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _words(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """As GPT-4 splits text (cl100k), with so many digits together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        rf"\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def split() -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return split


# as llama.cpp splits them (its table of pre-tokenizers)
_SPLITS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_then_byte_level,
    "starcoder": _digits_then_byte_level,
    "llama-bpe": _words("{1,3}"),
    "qwen2": _words(""),
}
# whose tokenizers take a word that is a token as it is, whatever the merges would make of it
_WHOLE_WORDS = ("llama-bpe",)
# whose tokenizers compose characters first
_COMPOSED = ("qwen2",)


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> list[int]:
    """Write the tokenizer files and return the ids that end a generation. Raises ModelError.

    fields: the GGUF's metadata.
    """
    tokens: list[str] = fields.get("tokenizer.ggml.tokens") or []
    # byte-level tokenizers add it only where the file says so
    bos: int | None = fields.get("tokenizer.ggml.bos_token_id")
    if not fields.get("tokenizer.ggml.add_bos_token"):
        bos = None
    tokenizer = _build(fields, tokens)
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _tokenizer_config(fields, tokens, bos is not None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return _end_ids(fields, tokens)


def _build(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    if len(set(tokens)) != len(tokens):
        raise ModelError("The GGUF's vocabulary names a token twice.", _USE_ORIGINAL)
    types: list[int] = fields.get("tokenizer.ggml.token_type") or []
    if fields.get("tokenizer.ggml.model") == _SENTENCEPIECE:
        tokenizer = sentencepiece_tokenizer(
            tokens,
            types,
            fields.get("tokenizer.ggml.scores") or [],
            unknown=fields.get("tokenizer.ggml.unknown_token_id"),
            space_prefix=fields.get("tokenizer.ggml.add_space_prefix", True),
        )
    else:
        tokenizer = _byte_level_tokenizer(fields, tokens)
    of_type = {
        kind: [
            AddedToken(token, normalized=False)
            for token, type_ in zip(tokens, types, strict=False)
            if type_ == kind
        ]
        for kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    }
    # all at once: each call builds the automaton that finds them anew
    tokenizer.add_special_tokens(of_type[TokenType.CONTROL])
    tokenizer.add_tokens(of_type[TokenType.USER_DEFINED])
    return tokenizer


def _byte_level_tokenizer(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != _BYTE_LEVEL or split not in _SPLITS:
        raise ModelError(
            f"The GGUF has a tokenizer of kind {kind} ({split}), which cannot be converted; sentencepiece "
            f"ones (llama) can, and byte-level ones (gpt2) with these splits: {', '.join(_SPLITS)}.",
            _USE_ORIGINAL,
        )
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges") or []]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    whole_words = split in _WHOLE_WORDS
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    if split in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _SPLITS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _tokenizer_config(fields: Mapping[str, Any], tokens: list[str], add_bos: bool) -> dict[str, Any]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {target: fields.get(f"tokenizer.ggml.{name}_token_id") for name, target in names.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        **{target: tokens[i] for target, i in ids.items() if i is not None},
    }
    if template := _chat_template(fields):
        config["chat_template"] = template
    return config


def _chat_template(fields: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    default = fields.get("tokenizer.chat_template")
    named = {
        name: fields.get(f"tokenizer.chat_template.{name}")
        for name in fields.get("tokenizer.chat_templates") or []
    }
    if not named:
        return default
    return [{"name": n, "template": t} for n, t in {"default": default, **named}.items() if t]


def _end_ids(fields: Mapping[str, Any], tokens: list[str]) -> list[int]:
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    types = fields.get("tokenizer.ggml.token_type") or []
    template = json.dumps(_chat_template(fields), ensure_ascii=False)
    turns = [
        i
        for i, t in enumerate(types)
        if t == TokenType.CONTROL and tokens[i] in _TURN_ENDS and tokens[i] in template
    ]
    return list(dict.fromkeys(i for i in (*named, *turns) if i is not None))

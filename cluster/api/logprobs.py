"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decodefleet.worker.protocol import TokenLogprobs
from decodefleet.worker.text.tokenizer import Tokenizer

from .wire import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

# JSON has no infinity
LEAST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(content=[_entry(tokenizer, entry) for entry in entries])


def completion_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], offsets: Sequence[int]
) -> CompletionLogprobs:
    """offsets: where each token begins in the choice's text, in characters."""
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=list(offsets))
    for entry in entries:
        _append(result, tokenizer, entry)
    return result


def prompt_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], entries: Sequence[TokenLogprobs]
) -> CompletionLogprobs:
    """Of an echoed prompt, whose first token has none. Offsets count the prompt's own text."""
    first = _label(tokenizer, tokens[0])
    result = CompletionLogprobs(tokens=[first], token_logprobs=[None], top_logprobs=[None], text_offset=[])
    for entry in entries:
        _append(result, tokenizer, entry)
    characters = 0
    seen = b""
    for token in tokens:
        result.text_offset.append(characters)
        seen += tokenizer.token_bytes(token)
        # whole characters only: a token that begins inside one is counted from where that one began
        whole = seen.decode("utf-8", "ignore")
        characters += len(whole)
        seen = seen[len(whole.encode()) :]
    return result


def _append(result: CompletionLogprobs, tokenizer: Tokenizer, entry: TokenLogprobs) -> None:
    best = dict(zip(entry.top_tokens, entry.top_logprobs, strict=True))
    best.setdefault(entry.token, entry.logprob)
    result.tokens.append(_label(tokenizer, entry.token))
    result.token_logprobs.append(max(entry.logprob, LEAST))
    assert result.top_logprobs is not None
    result.top_logprobs.append(
        {_label(tokenizer, token): max(logprob, LEAST) for token, logprob in best.items()}
    )


def _entry(tokenizer: Tokenizer, entry: TokenLogprobs) -> TokenLogprob:
    best = zip(entry.top_tokens, entry.top_logprobs, strict=True)
    own = _top(tokenizer, entry.token, entry.logprob)
    return TokenLogprob(
        token=own.token,
        logprob=own.logprob,
        bytes=own.bytes,
        top_logprobs=[_top(tokenizer, token, logprob) for token, logprob in best],
    )


def _top(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    data = tokenizer.token_bytes(token)
    return TopLogprob(token=data.decode("utf-8", "replace"), logprob=max(logprob, LEAST), bytes=list(data))


def _label(tokenizer: Tokenizer, token: int) -> str:
    """The token's text; one that is not whole characters as OpenAI writes it, so that labels differ."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

"""What a request may ask of the sampler. Torch-free: routers build these, workers obey them.

Validation happens here, once, and names the field, so that nothing invalid reaches an engine loop.
"""

from __future__ import annotations

import math

import msgspec

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP = 16
MAX_STOP_CHARACTERS = 1024
SEED_BITS = 64


class InvalidRequest(ValueError):
    """A request that cannot be served as it is written; `field` is the one to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request's sampling options; defaults are the OpenAI API's.

    n: sequences generated from one prompt.
    max_tokens: most tokens to generate per sequence; None means up to the model's length.
    min_tokens: end-of-sequence and stop token ids are masked before this many tokens.
    temperature: 0 is greedy.
    top_p, top_k (0 is off), min_p: filters, applied to the tempered distribution in the order top-k,
        top-p, min-p.
    repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output.
    presence_penalty, frequency_penalty: subtracted from logits of tokens seen in the output.
    seed: None draws one at admission.
    stop: stop strings, found by the front end on the text.
    stop_token_ids: end a sequence when sampled, in addition to the model's own end tokens.
    ignore_eos: go on past the model's end tokens.
    logprobs: report the chosen token's log-probability and this many best ones (0: the chosen only).
    prompt_logprobs: the same for each prompt token but the first; such requests do not read the prefix cache.
    logit_bias: added to the logits of these token ids.
    include_stop_str_in_output: keep the stop string in the text.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        # zero is legal for callers who only want the prompt scored
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0 if self.prompt_logprobs is not None else 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, 0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << (SEED_BITS - 1)), (1 << SEED_BITS) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP:
            raise InvalidRequest("stop", f"at most {MAX_STOP} stop strings")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequest("stop", "stop strings must be non-empty text")
        if any(len(text) > MAX_STOP_CHARACTERS for text in self.stop):
            raise InvalidRequest("stop", f"stop strings have at most {MAX_STOP_CHARACTERS} characters")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0)
            _number("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _integer(field: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(field, f"must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(field, f"must be {bounds}, not {value}")


def _number(field: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(field, f"must be a finite number, not {value!r}")
    if value < low or value > high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise InvalidRequest(field, f"must lie in {bracket}{low:g}, {high:g}], not {value:g}")

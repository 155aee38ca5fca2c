"""What `decodefleet bench serve` can be told; its flags are made from these fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from decodefleet.worker.config import Frozen

from .load import Api
from .prompts import DEFAULT_VOCABULARY

SERVER = "Server"
LOAD = "Load"
REQUESTS = "Requests"
RESULT = "Result"


class BenchError(Exception):
    """The benchmark cannot be run as asked; the message says what to do."""


def _option(default: Any, panel: str, description: str, **extra: Any) -> Any:
    """`env`: variable that stands in for the flag. `short`: its short form."""
    limits = {name: extra.pop(name) for name in ("ge", "gt") if name in extra}
    return Field(default, description=description, json_schema_extra={"panel": panel, **extra}, **limits)


def _split(value: Any) -> Any:
    """ "1,8" and ["1,8", "32"] to their parts; what is no text is left to pydantic."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [part.strip() for item in value for part in item.split(",") if part.strip()]
    return value


def _parse(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


Positive = Annotated[float, Field(gt=0)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), BeforeValidator(_split)]
Rates = Annotated[tuple[Positive, ...], BeforeValidator(_split)]
Object = Annotated[dict[str, Any], BeforeValidator(_parse)]


class BenchOptions(Frozen):
    """A benchmark. One run follows per concurrency, or per rate, or one for the trace."""

    url: str = _option("http://127.0.0.1:8000", SERVER, "the server's address")
    model: str | None = _option(None, SERVER, "served model; the server's first if not given")
    api: Api = _option("completions", SERVER, "which endpoint to load; chat needs --tokenizer")
    api_key: SecretStr | None = _option(None, SERVER, "sent as bearer token", env="OPENAI_API_KEY")
    connection_close: bool = _option(False, SERVER, "a new connection for each request")
    timeout: Positive = _option(600.0, SERVER, "seconds until a request counts as failed")

    concurrency: Counts = _option((1, 8, 32), LOAD, "closed loop: clients at once, one run each")
    rate: Rates = _option((), LOAD, "open loop instead: requests per second (Poisson), one run each")
    trace: Path | None = _option(None, LOAD, "open loop from a file: Mooncake .jsonl or Azure .csv")
    trace_speed: Positive = _option(1.0, LOAD, "2 replays the trace twice as fast")
    requests: int | None = _option(
        None,
        LOAD,
        "per run; if not given 4 per client (16 at least), a minute at the rate, or the whole trace",
        ge=1,
    )
    warmup: int = _option(2, LOAD, "requests sent first and not counted", ge=0)

    input_len: int | None = _option(None, REQUESTS, "prompt tokens, exactly (128); cuts a trace's", ge=1)
    output_len: int | None = _option(None, REQUESTS, "output tokens, exactly (128); cuts a trace's", ge=1)
    prefix_len: int = _option(0, REQUESTS, "how many of the prompt tokens are shared", ge=0)
    prefix_groups: int = _option(1, REQUESTS, "number of different shared prefixes", ge=1)
    tokenizer: str | None = _option(
        None, REQUESTS, "send text made with this model's tokenizer (folder or name) instead of token ids"
    )
    vocab_size: int = _option(DEFAULT_VOCABULARY, REQUESTS, "token ids are drawn below this", ge=2)
    temperature: float = _option(0.0, REQUESTS, "0 is greedy", ge=0)
    ignore_eos: bool = _option(True, REQUESTS, "generate on past end tokens, for exact lengths")
    include_usage: bool = _option(True, REQUESTS, "ask for token counts (stream_options)")
    extra_body: Object = _option({}, REQUESTS, "JSON object merged into each request")
    seed: str | None = _option(
        None, REQUESTS, "repeats the prompts of an earlier benchmark; if not given they are new to any cache"
    )

    output: Path | None = _option(None, RESULT, "write everything to this JSON file", short="-o")
    label: str = _option("", RESULT, "title of the table and the file")

    @model_validator(mode="after")
    def _one_kind_of_load(self) -> Self:
        if self.rate and self.trace is not None:
            raise ValueError("give --rate or --trace, not both")
        if self.api == "chat" and self.tokenizer is None:
            raise ValueError("chat takes text: name the model's tokenizer with --tokenizer")
        return self

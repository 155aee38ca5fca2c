"""What clients may send: OpenAI's fields, and vLLM's extra ones where the meaning is the same.

Fields that would change the meaning of an answer and are not supported are refused by name; any other
unknown field is ignored. How fields become SamplingParams is here as well, for it is their meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from decodefleet.worker.sampling_params import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP,
    MAX_STOP_CHARACTERS,
    SamplingParams,
)

from .errors import BadRequest

T = TypeVar("T")

MAX_TOKEN_ID = (1 << 31) - 1
MAX_TOKENS = 1 << 24
MAX_BIASES = 1024
MAX_KEY = 256

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Text = Annotated[str, StringConstraints(min_length=1)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
# every list stops at its first fault: a body may hold millions of them
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Finite = Annotated[float, Field(allow_inf_nan=False)]

# what is refused unless it is absent, null, empty, or this value that asks for nothing
UNSUPPORTED: dict[str, object] = {
    "audio": None,
    "function_call": "none",
    "functions": None,
    "guided_choice": None,
    "guided_grammar": None,
    "guided_json": None,
    "guided_regex": None,
    "modalities": ["text"],
    "prediction": None,
    "prompt_embeds": None,
    "prompt_logprobs": None,
    "response_format": {"type": "text"},
    "structured_outputs": None,
    "suffix": "",
    "tool_choice": "none",
    "tools": None,
    "use_beam_search": False,
    "web_search_options": None,
}


class Strict(BaseModel):
    """No coercion: "1" is not a number."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="a last chunk with the token counts")
    continuous_usage_stats: bool = Field(False, description="token counts in every chunk")


class GenerationFields(Strict):
    """Common to completions and chat."""

    model: str | None = Field(None, description="served name; may be left out where one model is served")
    n: int | None = Field(1, ge=1, le=MAX_N, description="answers to one prompt")
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS, description="most tokens of one answer")
    min_tokens: int | None = Field(0, ge=0, le=MAX_TOKENS, description="no end before this many tokens")
    temperature: Finite | None = Field(1.0, ge=0, le=2, description="0 is greedy")
    top_p: Finite | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(0, ge=-1, le=MAX_TOKEN_ID, description="0 and -1: off")
    min_p: Finite | None = Field(0.0, ge=0, le=1)
    presence_penalty: Finite | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(0.0, ge=-2, le=2)
    repetition_penalty: Finite | None = Field(1.0, gt=0, le=100)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOP)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=128)] | None = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    logit_bias: dict[str, Bias] | None = Field(
        None, max_length=MAX_BIASES, description="added to logits, by token id"
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(False, description="token ids beside the text")
    cache_salt: Text | None = Field(
        None, max_length=MAX_KEY, description="cached prefixes are shared only under one salt"
    )
    priority: int | None = Field(0, ge=-(1 << 31), le=(1 << 31) - 1, description="lower is sooner")
    user: str | None = Field(None, description="whose request this is, for fair shares")
    session_id: str | None = Field(None, max_length=MAX_KEY)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name in UNSUPPORTED.keys() & data.keys() if isinstance(data, dict) else ():
            value, harmless = data[name], UNSUPPORTED[name]
            if value not in (None, [], {}, harmless):
                raise BadRequest(f"{name} is not supported", param=name)
        return data

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _refuse_many_biases(cls, given: Any) -> Any:
        """Before any entry is looked at: mappings cannot stop at their first fault."""
        if isinstance(given, dict) and len(given) > MAX_BIASES:
            raise BadRequest(f"logit_bias: at most {MAX_BIASES} token ids", param="logit_bias")
        return given

    def sampling(self, *, max_tokens: int | None, logprobs: int | None, echo_scored: bool) -> SamplingParams:
        """Raises InvalidRequest. max_tokens None: as many as there is room for."""
        return SamplingParams(
            n=_or(self.n, 1),
            max_tokens=max_tokens,
            min_tokens=_or(self.min_tokens, 0),
            temperature=float(_or(self.temperature, 1.0)),
            top_p=float(_or(self.top_p, 1.0)),
            top_k=max(0, _or(self.top_k, 0)),
            min_p=float(_or(self.min_p, 0.0)),
            repetition_penalty=float(_or(self.repetition_penalty, 1.0)),
            presence_penalty=float(_or(self.presence_penalty, 0.0)),
            frequency_penalty=float(_or(self.frequency_penalty, 0.0)),
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo_scored else None,
            logit_bias=_logit_bias(self.logit_bias),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
        )


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Text | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)] = Field(
        description="text, token ids, or several of either"
    )
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="must equal n")
    echo: bool | None = Field(False, description="the prompt in front of the answer")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="this many best tokens per position"
    )
    add_special_tokens: bool | None = True


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="newer name of max_tokens"
    )
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = True
    add_special_tokens: bool | None = Field(False, description="beyond what the chat template writes")


class TokenizeRequest(Strict):
    """POST /tokenize: a prompt, or messages."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True


class DirectoryRequest(TokenizeRequest):
    """POST /debug/directory: who holds how much of a prompt, or of messages."""

    cache_salt: str = ""


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    if not given:
        return {}
    if not all(token.isascii() and token.isdecimal() and len(token) < 11 for token in given):
        raise BadRequest("logit_bias: keys must be token ids", param="logit_bias")
    return {int(token): float(bias) for token, bias in given.items()}

"""What a body may cost that is wrong all over."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from decodefleet.cluster.api.errors import BadRequest
from decodefleet.cluster.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MANY = 1000
BAD_PARTS = [{"role": "user", "content": [{"text": 1}] * MANY}]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (CompletionRequest, {"prompt": [[-1] * MANY] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * MANY}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": BAD_PARTS}),
        (TokenizeRequest, {"messages": BAD_PARTS * MANY}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
    ],
)
def test_lists_stop_at_their_first_fault(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as failure:
        model.model_validate(body)
    assert failure.value.error_count() <= 4


def test_too_many_biases_are_refused_unseen() -> None:
    with pytest.raises(BadRequest) as failure:
        CompletionRequest.model_validate({"prompt": "a", "logit_bias": {str(i): "x" for i in range(1025)}})
    assert failure.value.response.error.param == "logit_bias"


@pytest.mark.parametrize(
    "field",
    [{"stop": "x" * 1025}, {"stop": ["y", "x" * 1025]}, {"session_id": "x" * 257}, {"cache_salt": "x" * 257}],
)
def test_texts_that_are_kept_are_bounded(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": "a"} | field)

"""The HTTP surface fuzzed from its own OpenAPI document, with a fixed seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

load_all_checks()

CASES = {
    "POST /v1/completions": 700,
    "POST /v1/chat/completions": 700,
    "POST /tokenize": 250,
    "POST /detokenize": 250,
    "GET /v1/models/{model_id}": 60,
    "GET /debug/placements": 60,
}
CASES_OF_OTHERS = 5
POSITIVE_SHARE = 0.75
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_case_breaks_the_server(make_stack: Callable[..., Any]) -> None:
    stack = make_stack(workers=1, step_s=0.0, max_model_len=192, scheduling={"max_queue": 64})
    schema = schemathesis.openapi.from_url(f"{stack.url}/openapi.json")
    statuses: Counter[int] = Counter()
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            total = CASES.get(operation.label, CASES_OF_OTHERS)
            for mode, share in (
                (GenerationMode.POSITIVE, POSITIVE_SHARE),
                (GenerationMode.NEGATIVE, 1 - POSITIVE_SHARE),
            ):
                fuzz(session, operation, mode, max(1, int(total * share)), statuses)
    total = statuses.total()
    accepted = sum(count for status, count in statuses.items() if 200 <= status < 300)
    assert total >= 2000
    assert accepted / total >= 0.3, statuses
    assert all(status < 500 for status in statuses), statuses
    assert httpx.get(f"{stack.url}/health").status_code == 200


def fuzz(
    session: requests.Session,
    operation: Any,
    mode: GenerationMode,
    cases: int,
    statuses: Counter[int],
) -> None:
    strategy = operation.as_strategy(generation_mode=mode)

    @hypothesis.seed(20261129)
    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def run(case: Any) -> None:
        response = case.call(session=session, timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    try:
        run()
    except hypothesis.errors.Unsatisfiable:
        # an operation without parameters has no wrong call
        assert mode == GenerationMode.NEGATIVE

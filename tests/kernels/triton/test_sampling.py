"""Sampling, penalties and log-probabilities against plain torch: the same tokens, ties included."""

from __future__ import annotations

import math

import pytest
import torch
from poison import poisoned_memory
from torch import Tensor

from decodefleet.kernels.logprobs.kernel import token_logprobs_triton
from decodefleet.kernels.logprobs.reference import token_logprobs
from decodefleet.kernels.penalties.kernel import penalise_triton
from decodefleet.kernels.penalties.reference import penalise
from decodefleet.kernels.sampling.kernel import sample_triton
from decodefleet.kernels.sampling.reference import sample_reference

# temperature, top_k, top_p, min_p
PARAMETERS = [
    (0.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.5),
    (1.0, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.5, 50, 0.8, 0.01),
    (3.0, 1, 0.5, 0.0),
    (100.0, 3, 1.0, 0.0),
    # more than there are pieces, and more than there is room for candidates
    (2.0, 2500, 0.5, 0.0),
    (100.0, 4000, 0.9, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 99_999, 1.0, 0.0),
    (1.0, 0, 1.0, 1.0),
]


def columns(device: torch.device, parameters: list[tuple[float, int, float, float]]) -> tuple[Tensor, ...]:
    temperature, top_k, top_p, min_p = zip(*parameters, strict=True)
    return (
        torch.tensor(temperature, device=device),
        torch.tensor(top_k, device=device),
        torch.tensor(top_p, device=device),
        torch.tensor(min_p, device=device),
    )


def seeds(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,), device=device)
    return seed, torch.randint(0, 100_000, (rows,), device=device)


@pytest.mark.parametrize("V", [1, 17, 500, 9001])
@pytest.mark.parametrize("logits", ["smooth", "ties", "flat", "bans"])
def test_same_tokens_as_the_reference(device: torch.device, logits: str, V: int) -> None:
    torch.manual_seed(V)
    R = len(PARAMETERS)
    x = torch.randn(R, V, device=device) * 3
    if logits == "ties":
        x = (x * 2).round() / 2
    if logits == "flat":
        x = torch.ones_like(x)
    if logits == "bans" and V > 1:
        x[:, torch.randperm(V)[: V // 2]] = -math.inf
    rows = (*columns(device, PARAMETERS), *seeds(R, device))
    with poisoned_memory():
        found = sample_triton(x, *rows)
    assert torch.equal(found, sample_reference(x, *rows))


def test_kept_set_is_that_of_the_filters(device: torch.device) -> None:
    """0.5 and 0.25 of the mass, then two tokens of 0.125 that tie."""
    x = torch.tensor([0.125, 0.5, 0.125, 0.25]).log().to(device)
    filters = {
        (3, 1.0, 0.0): {0, 1, 2, 3},
        (2, 1.0, 0.0): {1, 3},
        (0, 0.74, 0.0): {1, 3},
        (0, 0.76, 0.0): {0, 1, 2, 3},
        (0, 0.49, 0.0): {1},
        (0, 1.0, 0.49): {1, 3},
        (2, 0.6, 0.0): {1},
        (2, 0.7, 0.0): {1, 3},
    }
    R = 5
    for (top_k, top_p, min_p), kept in filters.items():
        rows = columns(device, [(1.0, top_k, top_p, min_p)] * R)
        seed = torch.arange(R, device=device)
        tokens = sample_triton(x.expand(R, 4), *rows, seed, torch.zeros_like(seed))
        assert set(tokens.tolist()) <= kept
        assert torch.equal(tokens, sample_reference(x.expand(R, 4), *rows, seed, torch.zeros_like(seed)))


def test_a_row_does_not_see_the_others(device: torch.device) -> None:
    torch.manual_seed(0)
    R = len(PARAMETERS)
    x = torch.randn(R, 3000, device=device) * 2
    rows = (*columns(device, PARAMETERS), *seeds(R, device))
    whole = sample_triton(x, *rows)
    for i in range(R):
        alone = sample_triton(x[i : i + 1], *(column[i : i + 1] for column in rows))
        assert torch.equal(alone[0], whole[i])


def test_penalties(device: torch.device) -> None:
    torch.manual_seed(0)
    R, V, L = 4, 1500, 1100
    x = torch.randn(R, V, device=device)
    tokens = torch.randint(0, V, (R, L), device=device, dtype=torch.int32)
    # padding must not be read as a token
    known = torch.tensor([1100, 7, 1, 1025], device=device)
    tokens[1, 7:] = 2**30
    prompt = torch.tensor([500, 7, 0, 1025], device=device)
    parameters = [(1.3, 0.5, 0.25), (0.8, -1.0, 0.0), (1.0, 0.0, 2.0), (1.0, 0.0, 0.0)]
    rows = (tokens, prompt, known, *torch.tensor(parameters, device=device).T.contiguous())
    with poisoned_memory():
        found = penalise_triton(x, *rows)
    assert torch.equal(found, penalise(x, *rows))
    assert torch.equal(found[3], x[3])


@pytest.mark.parametrize(("V", "top"), [(17, 5), (5000, 20), (5000, 0)])
def test_logprobs(device: torch.device, V: int, top: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, V, device=device) * 5
    x[1, 3:7] = -math.inf
    x[2] += 1000
    tokens = torch.randint(0, V, (6,), device=device)
    tokens[1] = 4
    with poisoned_memory():
        found = token_logprobs_triton(x, tokens, top)
    wanted = token_logprobs(x, tokens, top)
    assert torch.equal(found.rank_R, wanted.rank_R)
    assert torch.equal(found.top_tokens_RK, wanted.top_tokens_RK)
    torch.testing.assert_close(found.logprob_R, wanted.logprob_R, rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(found.top_logprobs_RK, wanted.top_logprobs_RK, rtol=1e-5, atol=2e-4)

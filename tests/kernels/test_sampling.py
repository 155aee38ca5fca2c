from __future__ import annotations

import math

import pytest
import torch

from decodefleet.kernels import ops
from decodefleet.kernels.sampling.reference import (
    apply_penalties,
    filter_logits,
    gumbel_noise,
    sample_reference,
)

CPU = torch.device("cpu")


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    together = gumbel_noise([1, 2, 1], [5, 5, 6], 1000, CPU)
    for row, (seed, position) in enumerate([(1, 5), (2, 5), (1, 6)]):
        assert torch.equal(gumbel_noise([seed], [position], 1000, CPU)[0], together[row])
    assert torch.equal(gumbel_noise([1], [5], 500, CPU)[0], together[0, :500])
    assert len({float(row.sum()) for row in together}) == 3


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(list(range(200)), [3] * 200, 2000, CPU)
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_no_token_is_favoured() -> None:
    noise = gumbel_noise(list(range(2000)), [3] * 2000, 2000, CPU)
    # means over 2000 seeds: standard error 0.0287, and the largest of 2000 stays under five of them
    assert float((noise.mean(0) - 0.5772).abs().max()) < 5 * 0.0287


def test_high_seed_bits_matter() -> None:
    low, high = gumbel_noise([7, 7 + (1 << 40)], [0, 0], 100, CPU)
    assert not torch.equal(low, high)


def test_argmax_of_perturbed_logits_samples_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 20_000
    noise = gumbel_noise(list(range(n)), [0] * n, 4, CPU)
    counts = (probabilities.log() + noise).argmax(-1).bincount(minlength=4)
    chi_square = float(((counts - n * probabilities) ** 2 / (n * probabilities)).sum())
    # 99.9 % quantile with three degrees of freedom
    assert chi_square < 16.3


def test_positions_are_independent() -> None:
    n = 20_000
    draws = gumbel_noise([42] * n, list(range(n)), 2, CPU).argmax(-1)
    heads = int(draws.sum())
    assert abs(heads - n / 2) < 4 * math.sqrt(n) / 2
    agree = int((draws[1:] == draws[:-1]).sum())
    assert abs(agree - n / 2) < 4 * math.sqrt(n) / 2


def kept(logits: list[float], *, k: int = 0, p: float = 1.0, m: float = 0.0) -> list[int]:
    filtered = filter_logits(torch.tensor([logits]), [k], [p], [m])
    return torch.isfinite(filtered[0]).nonzero().flatten().tolist()


def test_filters() -> None:
    logits = [math.log(x) for x in (0.5, 0.25, 0.15, 0.1)]
    assert kept(logits) == [0, 1, 2, 3]
    assert kept(logits, k=2) == [0, 1]
    assert kept(logits, k=9) == [0, 1, 2, 3]
    assert kept(logits, p=0.5) == [0]
    assert kept(logits, p=0.51) == [0, 1]
    assert kept(logits, p=1e-6) == [0]
    assert kept(logits, p=0.9999) == [0, 1, 2, 3]
    assert kept(logits, m=0.4) == [0, 1]
    assert kept(logits, m=1.0) == [0]
    # top-p acts on what top-k left: 0.5 of 0.75 is two thirds
    assert kept(logits, k=2, p=0.6) == [0]
    assert kept(logits, k=2, p=0.7) == [0, 1]


def test_equal_logits_at_the_border_stay() -> None:
    assert kept([1.0, 1.0, 1.0, 0.0], k=1) == [0, 1, 2]


def test_penalties() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0]])
    seen = torch.tensor([[True, True, False, True]])
    counts = torch.tensor([[0, 0, 0, 2]])
    column = lambda x: torch.tensor([[x]])  # noqa: E731
    found = apply_penalties(logits, seen, counts, column(2.0), column(0.5), column(0.25))
    assert found.tolist() == [[1.0, -4.0, 1.0, 0.5 - 0.5 - 0.5]]


def test_children_of_one_seed_differ() -> None:
    seeds = [ops.child_seed(99, index) for index in range(50)]
    assert seeds[0] == 99
    assert len(set(seeds)) == 50
    assert all(0 <= seed < 1 << 64 for seed in seeds)


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"top_k": 100, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.0},
    {"temperature": 0.2, "top_p": 0.8},
    {"temperature": 3.0, "top_p": 0.5},
]


def rows_of(count: int, **options: float) -> tuple[torch.Tensor, ...]:
    """The per-row tensors of `ops.sample`, equal but for seed and position."""
    wanted = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    tensors = {name: torch.full((count,), float(value)) for name, value in wanted.items()}
    tensors["top_k"] = tensors["top_k"].long()
    return (*tensors.values(), torch.arange(7, 7 + count), torch.arange(count))


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [5, 1000, 4999])
def test_native_sampling_chooses_what_the_reference_does(
    threads: int, vocab: int, options: dict[str, float]
) -> None:
    torch.manual_seed(vocab)
    logits, rows = torch.randn(64, vocab) * 3, rows_of(64, **options)
    found = ops.sample(logits, *rows)
    assert torch.equal(found, sample_reference(logits, *rows))
    alone = ops.sample(logits[5:6].contiguous(), *(row[5:6].contiguous() for row in rows))
    assert torch.equal(alone, found[5:6])


def test_a_batch_mixes_all_kinds_of_rows() -> None:
    logits = torch.randn(4, 300)
    rows = (
        torch.tensor([0.0, 1.0, 0.7, 1.5]),
        torch.tensor([0, 5, 0, 0]),
        torch.tensor([1.0, 1.0, 0.9, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.3]),
        torch.tensor([1, -2, 3, -(1 << 63)]),
        torch.tensor([0, 1, 2, 3]),
    )
    found = ops.sample(logits, *rows)
    assert torch.equal(found, sample_reference(logits, *rows))
    assert int(found[0]) == int(logits[0].argmax())


def test_sampled_frequencies_follow_the_filtered_distribution() -> None:
    n, probabilities = 20_000, torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    draws = ops.sample(probabilities.log().expand(n, 5).contiguous(), *rows_of(n, top_p=0.85))
    counts = draws.bincount(minlength=5)
    kept = probabilities[:3] / 0.9
    assert counts[3:].tolist() == [0, 0]
    assert float(((counts[:3] - n * kept) ** 2 / (n * kept)).sum()) < 13.8


@pytest.mark.parametrize("vocabulary", [1, 7, 16, 33, 1000])
def test_the_likeliest_token_is_the_first_of_equals(vocabulary: int) -> None:
    torch.manual_seed(0)
    logits = torch.randint(-3, 4, (64, vocabulary)).float()
    logits[1] = float("-inf")
    best = logits.amax(-1, keepdim=True)
    assert ops.argmax(logits).tolist() == [row.index(True) for row in (logits == best).tolist()]

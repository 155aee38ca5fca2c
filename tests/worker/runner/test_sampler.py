"""A step's sampling against each row's parameters applied by hand, over several tokens of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from decodefleet.kernels.sampling.reference import gumbel_noise
from decodefleet.worker.batcher import Chunk
from decodefleet.worker.runner.buffers import Staging
from decodefleet.worker.runner.sampler import SampleFields, Sampler, SampleRow, sample_rows
from decodefleet.worker.runner.token_history import FEWEST_TOKENS, TokenHistory
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.sequence import Request, Sequence, State

VOCAB = 40
CPU = torch.device("cpu")


def make_sequence(tokens: list[int], **params: object) -> Sequence:
    sampling = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
    request = Request("r", 0, sampling, list(tokens), b"", 99, frozenset((0, 1)), (0, 0))
    seq = Sequence(request, 0, 7, list(tokens), [], state=State.RUNNING)
    request.live.append(seq)
    return seq


def sample(sampler: Sampler, seqs: list[Sequence], logits_SV: Tensor) -> tuple[list[SampleRow], list[int]]:
    chunks = [Chunk(seq, 0, seq.length, samples=True) for seq in seqs]
    rows = sample_rows(chunks)
    fields = SampleFields(*Staging(1 << 14, CPU, depth=1).send(sampler.lay_out(chunks, rows)))
    tokens_R, _ = sampler.sample(logits_SV, rows, fields)
    return rows, tokens_R.tolist()


def by_hand(seq: Sequence, output: list[int], logits_V: Tensor) -> int:
    """The greedy choice under penalties, one token at a time."""
    params, known = seq.request.params, [*seq.request.prompt, *output]
    scores = logits_V.tolist()
    for token in range(VOCAB):
        if token in known:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        count = output.count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        scores[token] += params.logit_bias.get(token, 0.0)
        if token in (0, 1) and len(output) < params.min_tokens:
            scores[token] = float("-inf")
    return max(range(VOCAB), key=scores.__getitem__)


def test_tokens_in_flight_count_for_penalties() -> None:
    """The host learns nothing between the steps: the sequence only says that a token is on its way."""
    torch.manual_seed(0)
    sampler = Sampler(CPU)
    seqs = [
        make_sequence([3, 4, 5], frequency_penalty=1.5, presence_penalty=0.5),
        make_sequence([6]),
        make_sequence([7, 7, 8], repetition_penalty=3.0, logit_bias={9: 1.0}),
        make_sequence([2], frequency_penalty=2.0, min_tokens=4),
    ]
    logits_SV = torch.randn(4, VOCAB)
    outputs: list[list[int]] = [[] for _ in seqs]
    for _ in range(8):
        _, tokens = sample(sampler, seqs, logits_SV)
        wanted = [by_hand(*args) for args in zip(seqs, outputs, logits_SV, strict=True)]
        assert tokens == wanted
        for seq, output, token in zip(seqs, outputs, tokens, strict=True):
            seq.pending += 1
            output.append(token)
    assert len(set(outputs[0])) > 3
    assert len(set(outputs[1])) == 1


def test_siblings_draw_from_the_logits_of_the_prompt_they_share() -> None:
    head, alone = make_sequence([3, 4], temperature=2.0, frequency_penalty=0.1), make_sequence([5])
    siblings = [Sequence(head.request, i, seed, [3, 4], []) for i, seed in ((1, 8), (2, 9))]
    head.request.unborn = siblings
    torch.manual_seed(1)
    logits_SV = torch.randn(2, VOCAB)
    rows, tokens = sample(Sampler(CPU), [alone, head], logits_SV)
    assert [row.seq for row in rows] == [alone, head, *siblings]
    assert tokens[0] == int(logits_SV[0].argmax())
    for row, token in zip(rows[1:], tokens[1:], strict=True):
        noise_1V = gumbel_noise([row.seq.seed], [2], VOCAB, CPU)
        assert token == int((logits_SV[1] / 2.0 + noise_1V[0]).argmax())


def test_histories_outlive_preemption_and_their_rows_are_reused() -> None:
    history = TokenHistory(CPU)
    first = make_sequence([3, 3, 4])
    first.tokens.append(9)
    (row,) = history.rows([(first, first)])
    history.tokens_SL[row, 4] = 7
    first.state = State.WAITING
    others = [make_sequence([i]) for i in range(20)]
    history.rows([(seq, seq) for seq in others])
    assert history.rows([(first, first)]) == [row]
    assert history.tokens_SL[row, :5].tolist() == [3, 3, 4, 9, 7]
    room = len(history.tokens_SL)
    for seq in others:
        seq.state = State.FINISHED
    again = [make_sequence([30]) for _ in range(room - 1)]
    rows = history.rows([(seq, seq) for seq in again])
    assert len(history.tokens_SL) == room
    assert sorted([*rows, row]) == list(range(room))
    assert history.tokens_SL[rows, 0].tolist() == [30] * len(rows)


def test_histories_have_room_for_the_next_token_however_long_they_are() -> None:
    history = TokenHistory(CPU)
    short, long = make_sequence([3, 4]), make_sequence([5] * FEWEST_TOKENS)
    (first,) = history.rows([(short, short)])
    assert history.tokens_SL.shape[1] == FEWEST_TOKENS
    first_again, second = history.rows([(short, short), (long, long)])
    assert first_again == first
    assert history.tokens_SL[first, :2].tolist() == [3, 4]
    assert history.tokens_SL[second, FEWEST_TOKENS - 1 : FEWEST_TOKENS + 1].tolist() == [5, 0]

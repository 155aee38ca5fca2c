"""A recording repeats native calls on new inputs, and says so when there was something else among them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from decodefleet.kernels import ops

pytestmark = pytest.mark.skipif(
    not ops.can_record(torch.device("cpu"), torch.bfloat16), reason="no C++ compiler"
)
T, D, VOCABULARY = 3, 64, 50


class Net:
    """Embedding, then layers of norm, product and gate, whose intermediates come and go."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        self.table = torch.randn(VOCABULARY, D).bfloat16()
        self.norm = torch.rand(D).bfloat16()
        weights = [torch.randn(2 * D, D).bfloat16() / 8 for _ in range(layers)]
        self.layers = [ops.prepare_linear(w, None, invariant=True) for w in weights]

    def __call__(self, tokens_T: Tensor) -> Tensor:
        residual_TD = ops.embed(tokens_T, self.table)
        x_TD: Tensor | None = None
        for layer in self.layers:
            x_TD = ops.norm_linear(x_TD, residual_TD, self.norm, 1e-5, layer, "silu")
        return ops.add_rms_norm_(x_TD, residual_TD, self.norm, 1e-5)


@pytest.mark.parametrize("inference", [True, False])
def test_a_replay_computes_what_the_call_would(inference: bool) -> None:
    net, memory = Net(layers=5), ops.RecordingMemory()
    with torch.inference_mode(inference):
        tokens_T = torch.tensor([1, 2, 3])
        output, replay = ops.record(lambda: net(tokens_T), memory)
        assert replay is not None
        assert torch.equal(output, net(tokens_T))
        for seed in range(20):
            torch.manual_seed(seed)
            tokens_T.copy_(torch.randint(0, VOCABULARY, (T,)))
            output.fill_(float("nan"))
            replay()
            assert torch.equal(output, net(tokens_T))


def test_recordings_share_memory_but_for_their_results() -> None:
    net, memory = Net(layers=5), ops.RecordingMemory()
    inputs = [torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6])]
    recorded = [ops.record(lambda tokens_T=tokens_T: net(tokens_T), memory) for tokens_T in inputs]
    outputs = [output.data_ptr() for output, _ in recorded]
    assert len(set(outputs)) == len(outputs)
    for _ in range(3):
        for tokens_T, (output, replay) in zip(inputs, recorded, strict=True):
            tokens_T += 1
            assert replay is not None
            replay()
            assert torch.equal(output, net(tokens_T))


def test_memory_is_lent_again_only_when_no_view_is_left() -> None:
    memory = ops.RecordingMemory()
    first = memory.like(torch.empty(4, 8))
    address, view = first.data_ptr(), first[1:].view(-1)
    del first
    second = memory.like(torch.empty(4, 8))
    assert second.data_ptr() != address
    del view
    assert memory.like(torch.empty(4, 8)).data_ptr() == address
    assert memory.like(torch.empty(0, 8)).shape == (0, 8)


def test_work_of_torch_cannot_be_repeated() -> None:
    net, memory = Net(layers=1), ops.RecordingMemory()
    tokens_T = torch.tensor([1, 2, 3])
    for run in (lambda: net(tokens_T) * 2, lambda: net(tokens_T.clone()), lambda: torch.zeros(3)):
        assert ops.record(run, memory)[1] is None
    output, replay = ops.record(lambda: net(tokens_T.view(3)).unsqueeze(0)[:, :2], memory)
    assert replay is not None
    assert output.shape == (1, 2, D)


def test_nothing_is_recorded_afterwards() -> None:
    net, memory = Net(layers=1), ops.RecordingMemory()
    tokens_T = torch.tensor([1, 2, 3])
    with pytest.raises(RuntimeError, match="in the middle"):
        ops.record(lambda: _fail(net(tokens_T)), memory)
    output, replay = ops.record(lambda: net(tokens_T), memory)
    net(torch.tensor([9, 9, 9]))
    assert replay is not None
    replay()
    assert torch.equal(output, net(tokens_T))


def test_calls_of_another_thread_are_not_recorded() -> None:
    net, memory = Net(layers=1), ops.RecordingMemory()
    tokens_T, others_T = torch.tensor([1, 2, 3]), torch.tensor([7, 8, 9])

    def run() -> Tensor:
        thread = threading.Thread(target=lambda: net(others_T))
        thread.start()
        thread.join()
        return net(tokens_T)

    alone = ops.record(lambda: net(tokens_T), memory)[1]
    beside = ops.record(run, memory)[1]
    assert alone is not None
    assert beside is not None
    assert beside.names == alone.names


def _fail(_: Tensor) -> Tensor:
    raise RuntimeError("in the middle")

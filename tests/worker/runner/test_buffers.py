"""What is sent arrives, at an address that depends on the shapes before it only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from decodefleet.worker.runner.buffers import ALIGNMENT, Array, HostCopy, Staging

CPU = torch.device("cpu")

some_arrays = st.lists(
    arrays.arrays(
        st.sampled_from([np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)]),
        arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=9),
        elements=st.integers(0, 1000),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(sent=some_arrays, capacity=st.integers(0, 600), others=some_arrays)
def test_all_arrays_arrive_whether_they_fit_or_not(
    sent: list[Array], capacity: int, others: list[Array]
) -> None:
    staging = Staging(capacity, CPU, depth=2)
    for batch in (others, sent):
        tensors = staging.send(batch)
        assert len(tensors) == len(batch)
        for tensor, array in zip(tensors, batch, strict=True):
            assert tuple(tensor.shape) == array.shape
            np.testing.assert_array_equal(tensor.numpy(), array)
            assert tensor.numpy().dtype == array.dtype


def test_arrays_keep_their_address_whatever_follows_them() -> None:
    staging = Staging(4096, CPU, depth=2)
    first, second = np.arange(5), np.ones((3, 3), dtype=np.int32)
    addresses = [
        [tensor.data_ptr() for tensor in staging.send([first, second, *rest])[:2]]
        for rest in ([], [np.arange(9)], [np.arange(2), np.zeros(100)[:0].astype(np.float32)])
    ]
    assert addresses[0] == addresses[1] == addresses[2]
    assert (addresses[0][1] - addresses[0][0]) % ALIGNMENT == 0


def test_what_is_already_on_the_host_is_there() -> None:
    tensors = [torch.arange(3), torch.zeros(0)]
    assert [tensor.tolist() for tensor in HostCopy(tensors).wait()] == [[0, 1, 2], []]


@pytest.mark.gpu
def test_a_gpu_gets_and_gives_the_same() -> None:
    staging = Staging(1 << 16, torch.device("cuda"), depth=2)
    for step in range(8):
        sent = [np.arange(100) + step, np.full((3, 70), step, dtype=np.int32), np.arange(20_000)]
        copy = HostCopy([tensor * 2 for tensor in staging.send(sent)])
        for tensor, array in zip(copy.wait(), sent, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array * 2)

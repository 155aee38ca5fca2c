from __future__ import annotations

import pytest
import torch

from decodefleet.kernels.cpu.arena import HUGE_PAGE
from decodefleet.kernels.kv_cache.layout import SLAB_ALIGN, KvLayout

DTYPES = [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_slab_holds_every_number_once(dtype: torch.dtype, head_dim: int) -> None:
    layout = KvLayout(layers=3, kv_heads=1, block_size=16, head_dim=head_dim, dtype=dtype)
    cache = layout.allocate(4, torch.device("cpu"))
    assert cache.values.shape == (4, 3, 2, 1, 16, head_dim)
    assert layout.slab_bytes % SLAB_ALIGN == 0
    cache.values[2] = 1.0
    if cache.scales is not None:
        assert cache.scales.shape == cache.values.shape[:-1]
        cache.scales[2] = 1.0
    touched = cache.slabs.any(dim=1)
    assert touched.tolist() == [False, False, True, False]
    # a scale of 1.0 and a bf16 or fp8 of 1.0 have set bits in known places: every number was written once
    values = cache.slabs[2, : layout.value_bytes].view(dtype).float()
    assert values.eq(1.0).all()
    assert cache.slabs[2, layout.value_bytes :].view(torch.float32).sum() == layout.scale_bytes // 4


def test_a_large_cache_is_zero_aligned_and_apart_from_others() -> None:
    layout = KvLayout(layers=4, kv_heads=2, block_size=16, head_dim=64, dtype=torch.int8)
    one, other = (layout.allocate(300, torch.device("cpu")) for _ in range(2))
    assert one.slabs.nbytes > HUGE_PAGE
    assert one.slabs.data_ptr() % SLAB_ALIGN == 0
    assert not one.slabs.any()
    one.slabs.fill_(1)
    assert not other.slabs.any()


def test_a_copied_slab_is_the_same_block() -> None:
    layout = KvLayout(layers=2, kv_heads=2, block_size=16, head_dim=64, dtype=torch.int8)
    cache = layout.allocate(2, torch.device("cpu"))
    assert cache.scales is not None
    cache.values[0] = torch.randint(-127, 128, cache.values[0].shape, dtype=torch.int8)
    cache.scales[0] = torch.rand(cache.scales[0].shape)
    cache.slabs[1] = cache.slabs[0]
    assert torch.equal(cache.values[1], cache.values[0])
    assert torch.equal(cache.scales[1], cache.scales[0])

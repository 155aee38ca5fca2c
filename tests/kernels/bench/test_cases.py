from __future__ import annotations

import torch

from decodefleet.kernels.aot import OPERATIONS
from decodefleet.kernels.bench.case import Case
from decodefleet.kernels.bench.cases import cases
from decodefleet.kernels.bench.timing import Limits, copies_wanted, measure

CPU = torch.device("cpu")


def case(kernel: str, variant: str) -> Case:
    (found,) = [c for c in cases(CPU) if (c.kernel, c.variant) == (kernel, variant)]
    return found


def test_cases_are_of_known_operations_and_told_apart() -> None:
    found = list(cases(CPU))
    assert {c.kernel for c in found} <= OPERATIONS.keys()
    assert len({(c.kernel, c.variant) for c in found}) == len(found)
    assert all(c.moved > 0 and c.flops >= 0 for c in found)


def test_bytes_and_flops_come_from_the_shapes() -> None:
    qkv = case("linear", "qkv, 8 rows")
    assert qkv.moved == 2 * 960 * 576 + 2 * 8 * (960 + 576)
    assert qkv.flops == 2 * 8 * 960 * 576
    assert case("linear", "qkv, 8 rows, int8").moved == 960 * 576 + 2 * 8 * (960 + 576)
    decode = case("paged_attention", "decode, 8 x 512")
    assert decode.moved == 8 * 512 * 2 * 3 * 64 * 2 + 2 * 8 * 9 * 64 * 2
    assert decode.flops == 4 * 8 * 9 * 64 * 512
    prefill = case("paged_attention", "prefill, 512 after 1536")
    assert prefill.flops == 4 * 9 * 64 * sum(range(1537, 2049))


def test_operations_agree_with_their_references() -> None:
    torch.manual_seed(0)
    small = [
        c for c in cases(CPU) if "2048" not in c.variant and "512" not in c.variant and "64" not in c.variant
    ]
    assert len(small) > 15
    for c in small:
        work = c.make()
        found, wanted = work.run().double(), work.reference().double()
        # int8 weights differ from those they stand for
        limit = 0.02 if "int8" in c.variant else 0.006
        assert float((found - wanted).norm() / wanted.norm().clamp(min=1e-9)) < limit, c.variant


def test_the_slower_of_memory_and_arithmetic_is_the_limit() -> None:
    limits = Limits(bandwidth=10.0, matmul=100.0)
    assert limits.seconds(moved=20, flops=100) == 2.0
    assert limits.seconds(moved=20, flops=500) == 5.0


def test_inputs_outgrow_the_caches() -> None:
    assert copies_wanted(1 << 30, CPU) == 1
    assert copies_wanted(32 << 20, CPU) == 8
    assert copies_wanted(1, CPU) == 64


def test_every_set_of_inputs_is_used() -> None:
    used: set[int] = set()
    assert measure([lambda i=i: used.add(i) for i in range(3)], CPU) > 0
    assert used == {0, 1, 2}

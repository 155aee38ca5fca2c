"""Chains from segments: equal prefixes and nothing else have equal names."""

from decodefleet.cluster.bench.workload import Request, Segment
from decodefleet.cluster.simulate.arrivals import Chains, arrivals


def request(*keys: str, length: int = 512, tail: int = 0, at: float = 0.0) -> Request:
    segments = [Segment(key, length) for key in keys]
    return Request((*segments, *([Segment("tail", tail)] if tail else [])), 7, at)


def test_equal_prefixes_have_equal_names():
    chains = Chains(128)
    one, two = chains.of(request("a", "b")), chains.of(request("a", "c"))
    assert len(one) == len(two) == 8 * 16
    assert one[: 4 * 16] == two[: 4 * 16]
    assert one[4 * 16 :] != two[4 * 16 :]
    assert len({one[i : i + 16] for i in range(0, len(one), 16)}) == 8


def test_same_segment_behind_another_prefix_is_another_content():
    chains = Chains(512)
    assert chains.of(request("a", "x"))[16:] != chains.of(request("b", "x"))[16:]


def test_partial_blocks_have_no_name():
    assert len(Chains(64).of(request("a", tail=100))) == (8 + 1) * 16


def test_copies_share_nothing_and_come_in_order():
    made = arrivals([request("a", at=0.0), request("a", at=10.0)], 512, shared=True, copies=2)
    assert [arrival.at for arrival in made] == [0.0, 5.0, 5.0, 10.0]
    assert len({arrival.chain for arrival in made}) == 2


def test_copies_of_a_trace_that_begins_late_take_no_longer_than_it():
    made = arrivals([request("a", at=100.0), request("a", at=110.0)], 512, shared=True, copies=2)
    assert [arrival.at for arrival in made] == [100.0, 105.0, 105.0, 110.0]


def test_prompts_that_share_nothing_need_no_chains():
    assert arrivals([request("a")], 512, shared=False)[0].chain == b""

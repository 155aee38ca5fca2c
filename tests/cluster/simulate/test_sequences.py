"""Groups that advance without loops over members agree with ones that loop."""

from hypothesis import given
from hypothesis import strategies as st

from decodefleet.cluster.simulate.arrivals import Arrival
from decodefleet.cluster.simulate.sequences import Decoding, Sequence

SIZE = 4


def started(number: int, prompt: int, output: int) -> Sequence:
    sequence = Sequence(number, Arrival(0.0, prompt, output, b""), 0.0)
    sequence.computed, sequence.generated = prompt, 1
    sequence.nameless = -(-prompt // SIZE)
    return sequence


class Loop:
    """The same, member by member."""

    def __init__(self) -> None:
        self.members: list[list[int]] = []

    def blocks_for(self, steps: int) -> int:
        return sum(-(-(tokens + steps) // SIZE) - -(-tokens // SIZE) for _, tokens, _ in self.members)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(2, 15), st.integers(1, 9)), max_size=12))
def test_same_as_one_by_one(rounds):
    group, loop = Decoding(SIZE), Loop()
    for number, (prompt, output, steps) in enumerate(rounds):
        group.join(started(number, prompt, output))
        loop.members.append([number, prompt, output - 1])
        steps = min(steps, group.until_end)
        assert group.until_end == min(left for _, _, left in loop.members)
        for count in range(1, 2 * SIZE + 2):
            assert group.blocks_for(count) == loop.blocks_for(count)
        group.advance(steps)
        for member in loop.members:
            member[1] += steps
            member[2] -= steps
        assert group.kv_tokens == sum(tokens for _, tokens, _ in loop.members)
        ended = {sequence.number: sequence for sequence in group.take_ended()}
        over = {number: tokens for number, tokens, left in loop.members if not left}
        assert {number: sequence.computed for number, sequence in ended.items()} == over
        assert all(sequence.nameless == -(-sequence.computed // SIZE) for sequence in ended.values())
        loop.members = [member for member in loop.members if member[2]]
        assert len(group) == len(loop.members)
        assert group.newest is None or group.newest.number == max(member[0] for member in loop.members)

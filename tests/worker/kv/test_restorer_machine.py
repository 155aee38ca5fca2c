"""Anything at any time over tiers: random arrivals, aborts, forks, slow copies, rotten and lost disks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_parts import DISK, HYBRID, SINKS, SLAB_BYTES, Setup, prompt

from decodefleet.worker.kv.groups import PLAIN, KvGroups
from decodefleet.worker.kv.tiers.slab_file import SlabForm
from decodefleet.worker.sequence import Sequence, State


def flip(file: Path, slot: int, byte: int) -> None:
    """Damage a byte of a slab on disk."""
    form = SlabForm("", SLAB_BYTES, DISK)
    with file.open("r+b") as raw:
        raw.seek(form.slabs_start + slot * form.stride + byte)
        found = raw.read(1)
        if found:
            raw.seek(-1, os.SEEK_CUR)
            raw.write(bytes([found[0] ^ 255]))


class TiersMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, forks, steps, copies that take their time, and tiers that fail."""

    @initialize(
        groups=st.sampled_from([PLAIN, HYBRID, SINKS]),
        cpu=st.sampled_from([0, 4, 10, 64]),
        disk=st.booleans(),
        blocks=st.sampled_from([16, 20]),
        ranks=st.sampled_from([1, 2]),
    )
    def start(self, groups: KvGroups, cpu: int, disk: bool, blocks: int, ranks: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.disk = Path(self.folder.name) if disk or not cpu else None
        self.setup = Setup(groups, blocks=blocks * len(groups), cpu=cpu, disk=self.disk, ranks=ranks)
        self.seqs: list[Sequence] = []

    @property
    def alive(self) -> list[Sequence]:
        return [seq for seq in self.seqs if seq.state is not State.FINISHED]

    @rule(
        lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
        base=st.integers(0, 2),
        output=st.integers(1, 30),
        priority=st.integers(0, 1),
    )
    def arrive(self, lengths: list[int], base: int, output: int, priority: int) -> None:
        for i, length in enumerate(lengths):
            tokens = prompt(base + i, length)
            self.seqs.append(self.setup.add(tokens, output=output, priority=priority))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.setup.batcher.remove(data.draw(st.sampled_from(self.alive)))

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parents = [seq for seq in self.setup.batcher.running if not seq.restoring]
        if not parents or not self.setup.batcher.has_room:
            return
        parent = data.draw(st.sampled_from(parents))
        child = self.setup.make(parent.request.prompt, parent.request.max_tokens)
        child.tokens = list(parent.tokens)
        self.setup.kv.fork(parent, child)
        self.setup.batcher.start_forked(child)
        self.seqs.append(child)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            plan = self.setup.step()
            assert plan.chunks or not self.alive or any(seq.restoring for seq in self.alive)

    @rule(data=st.data(), jobs=st.integers(1, 6))
    def work(self, data: st.DataObject, jobs: int) -> None:
        for _ in range(jobs):
            data.draw(st.sampled_from(self.setup.executors)).run()

    @rule(rounds=st.integers(1, 3))
    def work_all(self, rounds: int) -> None:
        for _ in range(rounds):
            self.setup.work()
            self.setup.tiers.poll()

    @rule()
    def forget_the_pool(self) -> None:
        self.setup.pool.clear_cache()

    @rule()
    def forget_all(self) -> None:
        self.setup.tiers.clear()

    @precondition(lambda self: self.disk is not None)
    @rule(number=st.integers(0, DISK), byte=st.integers(0, SLAB_BYTES - 1), data=st.data())
    def rot(self, number: int, byte: int, data: st.DataObject) -> None:
        assert self.disk is not None
        slots = [entry.slot for entry in self.setup.tiers._tiers[-1].slots._entries.values()]
        if slots:
            flip(data.draw(st.sampled_from(sorted(self.disk.iterdir()))), slots[number % len(slots)], byte)

    @precondition(lambda self: self.disk is not None and len(self.seqs) > 12)
    @rule(data=st.data())
    def lose_the_disk(self, data: st.DataObject) -> None:
        assert self.disk is not None
        os.truncate(data.draw(st.sampled_from(sorted(self.disk.iterdir()))), 0)

    @invariant()
    def accounts_add_up(self) -> None:
        if hasattr(self, "setup"):
            self.setup.check()

    def teardown(self) -> None:
        if not hasattr(self, "setup"):
            return
        self.setup.run()
        assert not self.alive
        assert self.setup.pool.available == self.setup.pool.total
        assert not self.setup.tiers.held_blocks()
        for tier in self.setup.tiers._tiers:
            assert not any(entry.pins for entry in tier.slots._entries.values())
            assert not tier.slots._leaving
        self.setup.close()
        self.folder.cleanup()


TiersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTiersMachine = TiersMachine.TestCase

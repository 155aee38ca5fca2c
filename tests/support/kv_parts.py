"""Batcher, manager, tiers and their files, without a model: a step writes what it computes and checks what it
reads, so that a block that is lost, mixed up or overwritten too early shows at once."""

from __future__ import annotations

from pathlib import Path

import torch
from engines import RecordingSink
from lazy_executor import LazyExecutor
from second_rank import SecondRank

from decodefleet.worker.batcher import Batcher, StepPlan
from decodefleet.worker.config import BatchConfig, CacheConfig
from decodefleet.worker.kv.block_pool import BlockPool
from decodefleet.worker.kv.groups import FULL, PLAIN, KvGroups, WindowRule
from decodefleet.worker.kv.hashing import extend_chain
from decodefleet.worker.kv.manager import KvManager
from decodefleet.worker.kv.tiers.opening import open_tiers
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.sequence import Request, Sequence

BLOCK = 4
SLAB_BYTES = BLOCK * 8
ROOT = b"root"
DISK = 160
HYBRID = KvGroups.of([FULL, WindowRule(6)])
SINKS = KvGroups.of([WindowRule(6, sinks=3)])


def gib(blocks: int) -> float:
    return blocks * SLAB_BYTES / (1 << 30)


class Setup:
    """An engine's parts, with a model whose keys are a hash of all tokens up to theirs.

    keys: of each rank, whose are not those of the other.
    """

    def __init__(
        self,
        groups: KvGroups = PLAIN,
        *,
        blocks: int = 24,
        seqs: int = 4,
        budget: int = 10,
        cpu: int = 64,
        disk: Path | None = None,
        ranks: int = 1,
    ) -> None:
        self.sink = RecordingSink()
        self.pool = BlockPool(blocks, self.sink)
        slabs = [torch.zeros((blocks + 1, SLAB_BYTES), dtype=torch.uint8) for _ in range(ranks)]
        self.keys = [each.view(torch.int64) for each in slabs]
        cache = CacheConfig(
            cpu_kv_gib=gib(cpu * ranks), nvme_kv_path=disk, nvme_kv_gib=gib(DISK * ranks), kv_restore="always"
        )
        self.executors: list[LazyExecutor] = []
        self.other = SecondRank(slabs[1], disk, self._executor, self.work) if ranks > 1 else None
        tiers = open_tiers(cache, slabs[0], self.pool, self.sink, ROOT, self.other, self._executor)
        assert tiers is not None
        self.tiers = tiers
        for executor in self.executors:
            executor.hold = True
        self.kv = KvManager(self.pool, BLOCK, groups, prefix_caching=True, max_chunk=10, tiers=tiers)
        self.batcher = Batcher(BatchConfig(max_num_seqs=seqs, max_num_batched_tokens=budget), self.kv)
        self.arrivals = 0

    def _executor(self, threads: int) -> LazyExecutor:
        self.executors.append(LazyExecutor())
        return self.executors[-1]

    def add(self, prompt: list[int], *, output: int = 5, priority: int = 0) -> Sequence:
        seq = self.make(prompt, output, priority)
        self.batcher.add(seq)
        return seq

    def make(self, prompt: list[int], output: int, priority: int = 0) -> Sequence:
        order = (priority, self.arrivals)
        request = Request(str(self.arrivals), 0, SamplingParams(), prompt, ROOT, output, frozenset(), order)
        self.arrivals += 1
        seq = Sequence(request, 0, 0, list(prompt), extend_chain(ROOT, prompt, BLOCK))
        request.live.append(seq)
        return seq

    def step(self) -> StepPlan:
        self.tiers.poll()
        plan = self.batcher.plan()
        self.tiers.dispatch()
        for source, target in plan.copies:
            for keys in self.keys:
                keys[target] = keys[source]
        for chunk in plan.chunks:
            self._read(chunk.seq, chunk.start)
        for chunk in plan.chunks:
            self._write(chunk.seq, chunk.start, chunk.start + chunk.count)
        for chunk in plan.chunks:
            seq = chunk.seq
            seq.computed += chunk.count
            self.kv.commit(seq)
            if chunk.samples:
                seq.tokens.append(len(seq.tokens))
                if seq.output_tokens >= seq.request.max_tokens:
                    self.batcher.remove(seq)
        return plan

    def _read(self, seq: Sequence, end: int) -> None:
        """All that the token at `end` sees must be there."""
        for g, (own, group) in enumerate(zip(seq.blocks, self.kv.groups.groups, strict=True)):
            seen = {*range(min(group.rule.sinks, end)), *range(group.rule.first_seen(end), end)}
            for position in seen:
                for rank, keys in enumerate(self.keys):
                    found = keys[own.ids[position // BLOCK], position % BLOCK].item()
                    wanted = key(g, seq.tokens[: position + 1], rank)
                    assert found == wanted, f"token {position} in group {g} on rank {rank}"

    def _write(self, seq: Sequence, start: int, end: int) -> None:
        for g, own in enumerate(seq.blocks):
            for position in range(start, end):
                for rank, keys in enumerate(self.keys):
                    written = key(g, seq.tokens[: position + 1], rank)
                    keys[own.ids[position // BLOCK], position % BLOCK] = written

    def work(self) -> bool:
        """Every job that waits, until none does."""
        worked = False
        while any(executor.run() for executor in self.executors):
            worked = True
        return worked

    def run(self) -> None:
        """To the end of all sequences and transfers."""
        while self.batcher.running or self.batcher.waiting or self.tiers.busy:
            plan = self.step()
            assert plan.chunks or self.work() or not self.batcher.running
            self.check()

    def check(self) -> None:
        self.batcher.check_integrity()

    def close(self) -> None:
        self.tiers.close()
        if self.other is not None:
            self.other.close()


def key(group: int, tokens: list[int], rank: int) -> int:
    return hash((group, rank, *tokens))


def prompt(base: int, length: int = 24) -> list[int]:
    return [base * 100 + i for i in range(length)]


def fill_and_forget(setup: Setup, base: int = 1) -> list[int]:
    """A prompt whose blocks are in the CPU tier and not in the pool."""
    tokens = prompt(base)
    setup.add(tokens)
    setup.run()
    setup.pool.clear_cache()
    return tokens

"""Hit rates of the eviction policies on a trace with block hashes, through the real KV manager.

    python tests/bench/eviction.py conversation_trace.jsonl synthetic_trace.jsonl --out results/NAME

Traces are JSON lines with `input_length` and `hash_ids`, one per block of 512 tokens (Mooncake, FAST'25: not
part of this repository). Requests come one after another and leave their prompts behind; only full blocks
count. Beside the policies: a cache without end, and one that knows the future (Belady's, on blocks). Policies
were tuned on the first half of the traces; the second half is reported. Writes NAME.md and NAME.svg.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from lines_svg import Panel, line_chart

from decodefleet.worker.kv.block_pool import BlockPool
from decodefleet.worker.kv.eviction import EvictionPolicy, Lru
from decodefleet.worker.kv.hit_density import HitDensity
from decodefleet.worker.kv.manager import KvManager
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.sequence import Request
from decodefleet.worker.sequence import Sequence as KvSequence

BLOCK = 512
# of Llama 3 8B: where attention to the past takes as long as the weights
DOUBLING = 26_600 / BLOCK


class Prompt(NamedTuple):
    tokens: int
    names: list[bytes]


class Rate(NamedTuple):
    """Shares of blocks found, and of the time to compute all prompts that this saved."""

    hits: float
    saved: float


@dataclass
class Tally:
    """Prompts of n blocks take n + n² / (2 · doubling) units: the second term is attention."""

    hits: int = 0
    blocks: int = 0
    saved: float = 0.0
    cost: float = 0.0

    def add(self, hits: int, blocks: int) -> None:
        self.hits += hits
        self.blocks += blocks
        self.saved += hits + hits * hits / (2 * DOUBLING)
        self.cost += blocks + blocks * blocks / (2 * DOUBLING)

    @property
    def rate(self) -> Rate:
        return Rate(self.hits / self.blocks, self.saved / self.cost)


class Clairvoyant:
    """Evicts what is needed again last or never; `now` is the number of the request under way."""

    def __init__(self, total: int, prompts: Sequence[Prompt]) -> None:
        self.now = 0
        self._names = [b""] * total
        self._due: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._uses: dict[bytes, list[int]] = {}
        for number in range(len(prompts) - 1, -1, -1):
            for name in prompts[number].names:
                self._uses.setdefault(name, []).append(number)

    def __len__(self) -> int:
        return len(self._due)

    def __iter__(self) -> Iterator[int]:
        return iter(self._due)

    def computed(self, block: int, name: bytes, depth: int) -> None:
        self._names[block] = name

    def add(self, blocks: Sequence[int]) -> None:
        for order, block in enumerate(blocks):
            uses = self._uses[self._names[block]]
            while uses and uses[-1] <= self.now:
                uses.pop()
            due = uses[-1] if uses else 1 << 60
            self._due[block] = due
            heapq.heappush(self._heap, (-due, order, block))

    def reuse(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._due[block]

    def evict(self, count: int) -> list[int]:
        victims: list[int] = []
        while len(victims) < count:
            due, _, block = heapq.heappop(self._heap)
            if self._due.get(block) == -due:
                del self._due[block]
                victims.append(block)
        return victims

    def clear(self) -> list[int]:
        blocks = list(self._due)
        self._due.clear()
        return blocks


def read_trace(path: Path, first: float, last: float) -> list[Prompt]:
    """Prompts of the part of the trace between two shares of it."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names: dict[int, bytes] = {}
    prompts = []
    for row in rows[int(first * len(rows)) : int(last * len(rows))]:
        full = row["hash_ids"][: row["input_length"] // BLOCK]
        chain = [
            names.setdefault(number, blake2b(b"%d" % number, digest_size=16).digest()) for number in full
        ]
        if chain:
            prompts.append(Prompt(row["input_length"], chain))
    return prompts


def endless(prompts: Sequence[Prompt]) -> Rate:
    seen: set[bytes] = set()
    tally = Tally()
    for prompt in prompts:
        missing = (i for i, name in enumerate(prompt.names) if name not in seen)
        tally.add(next(missing, len(prompt.names)), len(prompt.names))
        seen.update(prompt.names)
    return tally.rate


def replay(prompts: Sequence[Prompt], total: int, policy: EvictionPolicy) -> Rate:
    kv = KvManager(BlockPool(total, eviction=policy), BLOCK, prefix_caching=True)
    tally = Tally()
    for number, prompt in enumerate(prompts):
        if isinstance(policy, Clairvoyant):
            policy.now = number
        # one token more, so that all full blocks may be found
        tokens = [0] * (len(prompt.names) * BLOCK + 1)
        request = Request(str(number), 0, SamplingParams(), tokens, b"", 1, frozenset(), (0, number))
        seq = KvSequence(request, 0, 0, tokens, prompt.names)
        prefix = kv.match(seq)
        if not kv.can_admit(seq, prefix, reserve=0):
            tally.add(0, len(prompt.names))
            continue
        kv.attach(seq, prefix)
        tally.add(seq.committed, len(prompt.names))
        assert kv.grow(seq, seq.remaining)
        seq.computed = len(tokens)
        kv.commit(seq)
        kv.release(seq)
    kv.check_integrity([])
    return tally.rate


def policies(total: int, prompts: Sequence[Prompt]) -> dict[str, Callable[[], EvictionPolicy]]:
    return {
        "lru": Lru,
        "cost": lambda: HitDensity(total, DOUBLING),
        "future known": lambda: Clairvoyant(total, prompts),
    }


def measure(name: str, prompts: Sequence[Prompt], sizes: Sequence[int]) -> tuple[list[str], Panel]:
    """Rows of the table, and a panel of the plot."""
    best = endless(prompts)
    rows: list[str] = []
    panel = Panel(name, "blocks of 512 tokens in the pool", [float(size) for size in sizes], {})
    for size in sizes:
        for policy, make in policies(size, prompts).items():
            began = time.perf_counter()
            rate = replay(prompts, size, make())
            seconds = time.perf_counter() - began
            panel.lines.setdefault(policy, []).append(100 * rate.hits)
            rows.append(
                f"| {name} | {size:,} | {policy} | {rate.hits:.2%} | {rate.hits / best.hits:.1%} |"
                f" {rate.saved:.2%} | {seconds:.1f} s |"
            )
            print(rows[-1], flush=True)
    panel.lines["endless"] = [100 * best.hits] * len(sizes)
    rows.append(f"| {name} | endless | | {best.hits:.2%} | 100 % | {best.saved:.2%} | |")
    return rows, panel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 3000, 10_000, 30_000])
    parser.add_argument("--part", type=float, nargs=2, default=[0.5, 1.0], help="shares of the trace")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [
        "| trace | blocks | policy | hits | of endless | time saved | replay |",
        "|---|---|---|---|---|---|---|",
    ]
    panels = []
    for path in options.traces:
        found, panel = measure(
            path.stem.removesuffix("_trace"), read_trace(path, *options.part), options.sizes
        )
        rows += found
        panels.append(panel)
    if options.out is not None:
        options.out.with_suffix(".md").write_text("\n".join(rows) + "\n", encoding="utf-8")
        options.out.with_suffix(".svg").write_text(line_chart(panels, "% of blocks found"), encoding="utf-8")


if __name__ == "__main__":
    main()

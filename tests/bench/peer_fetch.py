"""A prefix computed, and the same prefix fetched from another worker's memory, in turn.

    python tests/bench/peer_fetch.py [--model smollm2-135m] [--tokens 1024] [--rounds 5] [--gbps 100]

Two engines in one process, over loopback sockets: one computes a document, which the other fetches, and
computes another one as long. Prints a line of JSON with the seconds to the first token of both.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from decodefleet.worker.assets.resolve import resolve_model
from decodefleet.worker.config import CacheConfig, EngineConfig, ModelConfig
from decodefleet.worker.engine import Engine
from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.peers.links import PeerLinks
from decodefleet.worker.protocol import Peer, Submit, Tier
from decodefleet.worker.sampling_params import SamplingParams


class Quiet:
    """An EventSink that nobody listens to."""

    def kv_stored(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        return

    def kv_removed(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        return

    def kv_cleared(self) -> None:
        return


class Side:
    def __init__(self, folder: Path, gbps: float) -> None:
        self.links = PeerLinks("tcp://127.0.0.1:0", None)
        self.links.start()
        config = EngineConfig(
            model=ModelConfig(folder=folder, served_name="m"),
            cache=CacheConfig(kv_restore="always", kv_peer_gbps=gbps),
        )
        self.engine = Engine(config, Quiet(), lambda *_: None, peers=self.links)

    def submit(self, name: str, prompt: list[int], peer: Peer | None = None) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        self.engine.submit(
            Submit(
                request_id=name, incarnation="", epoch=0, prompt=pack_tokens(prompt), params=params, peer=peer
            )
        )


def first_token_s(asked: Side, others: list[Side], name: str, prompt: list[int], peer: Peer | None) -> float:
    began = time.perf_counter()
    asked.submit(name, prompt, peer)
    while asked.engine.has_work():
        for side in (asked, *others):
            if side.engine.has_work():
                side.engine.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gbps", type=float, default=100.0)
    options = parser.parse_args()
    folder = resolve_model(options.model).folder
    owner, other = Side(folder, options.gbps), Side(folder, options.gbps)
    rng = random.Random(0)
    computed, fetched = [], []
    for number in range(options.rounds):
        mine, theirs = ([rng.randrange(100, 4000) for _ in range(options.tokens + 1)] for _ in range(2))
        computed.append(first_token_s(other, [], f"own-{number}", mine, None))
        first_token_s(owner, [], f"owner-{number}", theirs, None)
        peer = Peer(
            worker_id="w", incarnation="i", endpoint=owner.links.endpoint, blocks=options.tokens // 16
        )
        fetched.append(first_token_s(other, [owner], f"fetched-{number}", theirs, peer))
    blocks = other.engine.stats().tiers["peer"].restored_blocks
    for side in (owner, other):
        side.links.close()
        side.engine.close()
    found = {
        "model": options.model,
        "tokens": options.tokens,
        "computed_s": statistics.median(computed),
        "fetched_s": statistics.median(fetched),
        "ratio": statistics.median(computed) / statistics.median(fetched),
        "blocks_fetched": blocks,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

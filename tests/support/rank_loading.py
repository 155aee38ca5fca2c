"""Loads one rank's part of a checkpoint in a process of its own, and says what was read and what it took.

python rank_loading.py FOLDER RANK RANKS    → {"read": bytes, "peak": bytes of private memory}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from decodefleet.worker.assets.checkpoint import read_config
from decodefleet.worker.kv.groups import KvGroups, layer_rules
from decodefleet.worker.layers.linear import LinearOptions
from decodefleet.worker.models.registry import model_class
from decodefleet.worker.models.weights import CheckpointWeights
from decodefleet.worker.parallel.ranks import Ranks
from decodefleet.worker.parallel.shard import Shard


def main(folder: Path, rank: int, size: int) -> None:
    info, device = read_config(folder), torch.device("cpu")
    shard = Shard.of(info, rank, size)
    peak = before = private_bytes()

    def on_bytes(_read: int, _total: int) -> None:
        nonlocal peak
        peak = max(peak, private_bytes())

    weights = CheckpointWeights(folder, torch.bfloat16, device, on_bytes)
    groups, options = KvGroups.of(layer_rules(info.layer_windows)), LinearOptions(ranks=Ranks(shard))
    model = model_class(info)(shard.view(info), groups, weights, 64, device, options)
    on_bytes(0, 0)
    del model
    print(json.dumps({"read": weights.nbytes, "peak": peak - before}))


def private_bytes() -> int:
    """Without pages of files, which the system takes back when it wants them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

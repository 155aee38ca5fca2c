"""What ranks read of a sharded checkpoint, and what loading takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_loading
import torch
from tiny_families import SHAPE
from transformers import LlamaConfig, LlamaForCausalLM

from decodefleet.worker.assets.checkpoint import weight_bytes, weight_files

LAYERS, HIDDEN = 8, 512


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 70 MB in several files."""
    shape: dict[str, Any] = {
        **SHAPE,
        "hidden_size": HIDDEN,
        "intermediate_size": 2048,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    }
    folder = tmp_path_factory.mktemp("sharded")
    LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().save_pretrained(folder, max_shard_size="11MB")
    assert len(weight_files(folder)) > 5
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_reads_and_holds_its_own_part_only(sharded: Path, ranks: int) -> None:
    # norms are everybody's
    norms = (2 * LAYERS + 1) * HIDDEN * torch.bfloat16.itemsize
    own = (weight_bytes(sharded) - norms) // ranks + norms
    for rank in range(ranks):
        command = [sys.executable, rank_loading.__file__, str(sharded), str(rank), str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        assert found["read"] == own
        assert found["peak"] < 1.2 * own

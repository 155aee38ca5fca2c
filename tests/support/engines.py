"""Engines for tests: tiny random Llamas that load in milliseconds, and the helpers that drive any engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from decodefleet.worker.config import (
    BatchConfig,
    CacheConfig,
    EngineConfig,
    KvCacheDtype,
    ModelConfig,
    RunnerConfig,
)
from decodefleet.worker.engine import Engine
from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.peers.links import PeerLinks
from decodefleet.worker.protocol import Submit, Tier, TokenDelta
from decodefleet.worker.sampling_params import SamplingParams

VOCAB = 96


@dataclass
class RecordingSink:
    """Mirrors what an engine says it holds, in its main pool and in the tiers below."""

    held: set[bytes] = field(default_factory=set)
    below: dict[Tier, set[bytes]] = field(default_factory=lambda: {"cpu": set(), "nvme": set()})

    def kv_stored(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        held = self._of(tier)
        assert held.isdisjoint(hashes), "stored twice"
        held.update(hashes)

    def kv_removed(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        held = self._of(tier)
        assert held.issuperset(hashes), "removed, and was never there"
        held.difference_update(hashes)

    def kv_cleared(self) -> None:
        for held in (self.held, *self.below.values()):
            held.clear()

    def _of(self, tier: Tier) -> set[bytes]:
        return self.held if tier == "gpu" else self.below[tier]


def write_tiny_llama(folder: Path, *, layers: int = 2, kv_heads: int = 1, head_dim: int = 32) -> Path:
    """A random two-layer model with 96 tokens and grouped queries, in Hugging Face form."""
    return _write_tiny(
        folder, layers, kv_heads, head_dim, architectures=["LlamaForCausalLM"], model_type="llama"
    )


def write_tiny_mistral(folder: Path, *, window: int) -> Path:
    """As the Llama, and every layer sees a window."""
    kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return _write_tiny(folder, 2, 1, 32, **kind, sliding_window=window)


def write_tiny_hybrid(folder: Path, *, window: int, pattern: str = "sfssfs", head_dim: int = 32) -> Path:
    """As the Llama, with a sliding layer for each s of the pattern and a full one for each f."""
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    kind = {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
    types = [kinds[layer] for layer in pattern]
    return _write_tiny(folder, len(pattern), 1, head_dim, **kind, sliding_window=window, layer_types=types)


def _write_tiny(folder: Path, layers: int, kv_heads: int, head_dim: int, **fields: Any) -> Path:
    hidden, heads, inner = 64, 2, 96
    config = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        prefix = f"model.layers.{i}"
        for name, rows in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, hidden)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.2
        for name, shape in shapes.items()
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def make_engine(
    folder: Path,
    *,
    blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_waiting: int = 64,
    prefix_caching: bool = True,
    kv_cache_dtype: KvCacheDtype = "auto",
    quantization: Literal["none", "int8"] = "none",
    max_model_len: int | None = None,
    sink: RecordingSink | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    tiers: Mapping[str, Any] = MappingProxyType({}),
    peers: PeerLinks | None = None,
    **runner: Any,
) -> Engine:
    """tiers: further fields of CacheConfig, windows too. runner: further fields of RunnerConfig."""
    config = EngineConfig(
        model=ModelConfig(
            folder=folder, served_name="tiny", max_model_len=max_model_len, quantization=quantization
        ),
        cache=CacheConfig(
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=prefix_caching,
            kv_cache_dtype=kv_cache_dtype,
            **tiers,
        ),
        batch=BatchConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=max_waiting,
        ),
        runner=RunnerConfig(device=device, threads=1, **runner),
    )
    return Engine(config, sink or RecordingSink(), lambda *_: None, peers=peers)


def make_submit(
    request_id: str, prompt: Iterable[int], params: SamplingParams | None = None, **fields: object
) -> Submit:
    return Submit(
        request_id=request_id,
        incarnation="",
        epoch=0,
        prompt=pack_tokens(list(prompt)),
        params=params or SamplingParams(temperature=0.0),
        **fields,  # type: ignore[arg-type]
    )


@dataclass
class Outcome:
    """All deltas of one sequence, put together."""

    tokens: list[int] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        return self.deltas[-1].finish_reason


def run_all(engine: Engine, *, check: bool = True) -> dict[tuple[str, int], Outcome]:
    """Steps until nothing is left, with every invariant checked after each step."""
    outcomes: dict[tuple[str, int], Outcome] = {}
    while engine.has_work():
        for delta in engine.step():
            outcome = outcomes.setdefault((delta.request_id, delta.index), Outcome())
            outcome.tokens += delta.tokens
            outcome.deltas.append(delta)
        if check:
            engine.check_integrity()
    stats = engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert stats.running == stats.waiting == 0
    return outcomes

"""The model families that our own code runs, for people: by the architecture that config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """models: some that are published under this architecture. gguf: the architecture of GGUF files of it."""

    title: str
    models: str
    gguf: str | None = None


FAMILIES: Mapping[str, Family] = {
    "Gemma3ForCausalLM": Family("Gemma 3 (text)", "Gemma 3 270M and 1B", "gemma3"),
    "LlamaForCausalLM": Family("Llama", "Llama 2 and 3, SmolLM 2, TinyLlama, Yi", "llama"),
    "MinistralForCausalLM": Family("Ministral", "Ministral 8B"),
    "MistralForCausalLM": Family("Mistral", "Mistral 7B, Nemo, Small", "llama"),
    "MixtralForCausalLM": Family("Mixtral", "Mixtral 8x7B and 8x22B"),
    "Phi3ForCausalLM": Family("Phi 3", "Phi 3 and 3.5 mini and medium, Phi 4, Phi 4 mini", "phi3"),
    "Qwen2ForCausalLM": Family("Qwen 2", "Qwen 2 and 2.5, QwQ, DeepSeek-R1 distillations", "qwen2"),
    "Qwen3ForCausalLM": Family("Qwen 3", "Qwen 3 0.6B to 32B", "qwen3"),
    "Qwen3MoeForCausalLM": Family("Qwen 3 MoE", "Qwen 3 30B-A3B and 235B-A22B"),
}

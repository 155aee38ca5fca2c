"""Which architectures can be run, by the name in config.json."""

from __future__ import annotations

from ..assets.checkpoint import ModelInfo, require_architecture
from .llama import LlamaModel

ARCHITECTURES: dict[str, type[LlamaModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MinistralForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
}


def model_class(info: ModelInfo) -> type[LlamaModel]:
    """Raises ModelError naming the architecture and the supported ones."""
    require_architecture(info, ARCHITECTURES)
    return ARCHITECTURES[info.architecture]

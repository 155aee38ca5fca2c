"""Which architectures can be run, by the name in config.json."""

from __future__ import annotations

from ..assets.checkpoint import ModelInfo
from .gemma3 import Gemma3Model
from .llama import LlamaModel
from .mixtral import MixtralModel
from .model import Model
from .phi3 import Phi3Model
from .qwen3 import Qwen3Model
from .qwen3_moe import Qwen3MoeModel

ARCHITECTURES: dict[str, type[Model]] = {
    "Gemma3ForCausalLM": Gemma3Model,
    "LlamaForCausalLM": LlamaModel,
    "MinistralForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "MixtralForCausalLM": MixtralModel,
    "Phi3ForCausalLM": Phi3Model,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": Qwen3Model,
    "Qwen3MoeForCausalLM": Qwen3MoeModel,
}


def has_family(info: ModelInfo) -> bool:
    """Whether our own code runs it; other decoders run by transformers' code."""
    return info.architecture in ARCHITECTURES


def model_class(info: ModelInfo) -> type[Model]:
    if has_family(info):
        return ARCHITECTURES[info.architecture]
    # transformers' modelling code takes seconds to import
    from .transformers_model import TransformersModel

    return TransformersModel

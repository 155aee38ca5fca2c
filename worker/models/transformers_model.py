"""Decoders that have no family here: transformers' own modelling code, with attention over our paged cache.

Slower, and a token's value may depend on its batch, as transformers' code chooses. Everything but attention
is transformers': it reaches `_attend` through its attention interface, with queries and keys already turned.
What our attention cannot do is refused while the model loads, never computed wrongly.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from decodefleet.kernels import ops
from decodefleet.kernels.ops import AttentionOptions, KvCache

from ..assets.checkpoint import ModelInfo
from ..assets.errors import ModelError
from ..kv.groups import KvGroups
from ..layers.linear import LinearOptions
from .model import Metas
from .weights import Weights

log = logging.getLogger(__name__)

ATTENTION = "decodefleet"
_OTHER_MODEL = "Serve a model of a family that `decodefleet models` lists."


@dataclass
class _Step:
    """What attention must know of the forward pass it is called from. attended: layers that have been."""

    info: ModelInfo
    groups: KvGroups
    kv: KvCache
    metas: Metas
    identity_1D: Tensor
    row_T: Tensor
    attended: set[int] = field(default_factory=set)


_step: ContextVar[_Step] = ContextVar("step")


class TransformersModel:
    """Token ids in, logits out."""

    def __init__(
        self,
        info: ModelInfo,
        groups: KvGroups,
        weights: Weights,
        max_positions: int | None,
        device: torch.device,
        linear: LinearOptions,
    ) -> None:
        _require_plain(info, max_positions, linear)
        self._info, self._groups = info, groups
        self._lm = _loaded(info, weights).to(device).eval()
        prefix = self._lm.base_model_prefix
        self._decoder: nn.Module = getattr(self._lm, prefix)
        # what stands behind the decoder is asked for its logits alone
        setattr(self._lm, prefix, _Given())
        # queries and keys come turned: by an angle of zero they stay as they are
        half = torch.ones(info.head_dim // 2, device=device)
        self._identity_1D = torch.cat((half, torch.zeros_like(half)))[None]
        log.warning(
            "%s has no family of its own here: transformers' code runs it, slower than ours, and rare tokens "
            "may differ with what else is in the batch",
            info.architecture,
        )

    def forward(self, tokens_T: Tensor, positions_T: Tensor, kv: KvCache, metas: Metas) -> Tensor:
        """Final hidden states [T, D], normed; the step's keys and values are in `kv` afterwards."""
        rows = torch.zeros_like(positions_T)
        step = _Step(self._info, self._groups, kv, metas, self._identity_1D, rows)
        token = _step.set(step)
        try:
            out = self._decoder(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False)
        finally:
            _step.reset(token)
        if len(step.attended) != self._info.layers:
            raise ModelError(
                f"Of {self._info.layers} layers of {self._info.architecture} {len(step.attended)} attend "
                "through transformers' attention interface.",
                _OTHER_MODEL,
            )
        hidden_TD: Tensor = out.last_hidden_state[0]
        return hidden_TD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """fp32 [R, V]."""
        logits_RV: Tensor = self._lm(inputs_embeds=hidden_RD[None], use_cache=False).logits[0]
        return logits_RV.float().contiguous()


class _Given(nn.Module):
    """In a decoder's place: answers with what it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _GivenOutput:
        return _GivenOutput(inputs_embeds)


@dataclass(frozen=True)
class _GivenOutput:
    """Of a decoder of any kind: whatever else its kind has is None."""

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        return None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D], key and value [1, KV heads, T, D] → [1, T, heads, D], as they call it."""
    step, layer = _step.get(), _layer_of(module)
    _require_same(step.info, layer, module, (query, key, value), attention_mask, options)
    group, place = step.groups.places[layer]
    meta, rule = step.metas[group], step.groups.rule_of(layer)
    qkv_THD = torch.cat((query, key, value), dim=1)[0].transpose(0, 1).contiguous()
    q_THD, _ = ops.rotary_store(qkv_THD, step.identity_1D, step.row_T, meta.slots_T, step.kv, place)
    learned = options.get("s_aux")
    attention = AttentionOptions(
        window=rule.window,
        soft_cap=options.get("softcap"),
        sink_logits_H=None if learned is None else learned.float(),
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    o_THD = ops.paged_attention(q_THD, step.kv, place, meta, scale, attention)
    step.attended.add(layer)
    return o_THD[None], None


def _layer_of(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} does not say which layer it is.", _OTHER_MODEL)
    return layer


def _require_same(
    info: ModelInfo,
    layer: int,
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Raise ModelError unless the layer wants what the cache was laid out for, and no more."""
    wanted = [(info.heads, info.head_dim), *[(info.kv_heads, info.head_dim)] * 2]
    found = [(x.shape[1], x.shape[3]) for x in qkv]
    if found != wanted:
        raise ModelError(
            f"{info.architecture} attends with heads of {found}; config.json means {wanted} (heads, size).",
            _OTHER_MODEL,
        )
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelError(
            f"{info.architecture} masks attention in a way of its own; causal attention is served.",
            _OTHER_MODEL,
        )
    window = options.get("sliding_window")
    if window is not None and window != info.layer_windows[layer]:
        raise ModelError(
            f"Layer {layer} of {info.architecture} wants a window of {window} tokens; config.json was read "
            f"as {info.layer_windows[layer]}.",
            _OTHER_MODEL,
        )


def _require_plain(info: ModelInfo, max_positions: int | None, linear: LinearOptions) -> None:
    refused = {
        "--batch-invariant": linear.invariant,
        "--window": max_positions is None,
        "--quantization": linear.quantization != "none",
        "--tensor-parallel-size": linear.ranks.shard.size > 1,
    }
    if flags := [flag for flag, given in refused.items() if given]:
        raise ModelError(
            f"{info.architecture} runs by transformers' code, which {' and '.join(flags)} cannot change.",
            f"Leave {' and '.join(flags)} out, or serve a model of a family that `decodefleet models` lists.",
        )


def _loaded(info: ModelInfo, weights: Weights) -> Any:
    """The model as transformers makes it, in the weights' dtype, on the host."""
    import transformers
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)
    kind = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": weights.dtype, "attn_implementation": ATTENTION}
    try:
        if weights.folder is not None:
            transformers.utils.logging.disable_progress_bar()
            return kind.from_pretrained(
                weights.folder, local_files_only=True, use_safetensors=True, **options
            )
        return kind.from_config(_config_of(info), **options)
    except (ValueError, KeyError, ImportError, OSError) as error:
        raise ModelError(
            f"The architecture {info.architecture} has no family here, and transformers "
            f"{transformers.__version__} cannot run it either: {str(error).splitlines()[0]}",
            _OTHER_MODEL,
        ) from error


def _config_of(info: ModelInfo) -> Any:
    from transformers import AutoConfig

    settings = {key: value for key, value in info.raw.items() if key != "model_type"}
    return AutoConfig.for_model(str(info.raw.get("model_type")), **settings)

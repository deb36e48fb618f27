"""The language-model head as the operators need it, proved at load against the model's own logits."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from gatekern.errors import UnsupportedModelError
from gatekern.ops.head import HeadSpec

_TILE = 8192  # vocabulary rows that the proof projects at once


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The language model's part of a (possibly multi-modal) configuration."""
    return config.get_text_config(decoder=True)


def text_parts(model: PreTrainedModel) -> tuple[PreTrainedModel, nn.Module]:
    """The causal language model (with its head) inside `model`, and its decoder (token ids to final hidden states)."""
    headed, decoder = model, model.get_decoder()
    while decoder.get_output_embeddings() is not None:  # a wrapper around a whole language model (Llama 4)
        headed, decoder = decoder, decoder.model
    return headed, decoder


def read_head(model: PreTrainedModel) -> HeadSpec:
    """Describe the head from the model and its configuration."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no plain floating-point output head "
            f"({type(head).__name__}); load it with an unquantised lm_head"
        )
    if weight.is_meta:
        raise UnsupportedModelError("the output head is offloaded: give it a device in device_map")
    config = text_config(model.config)
    return HeadSpec(
        weight=weight,
        bias=getattr(head, "bias", None),
        scale=_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _scale(config: PreTrainedConfig) -> float:
    """Factor between projection and logits; families spell it differently."""
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        return float(config.logit_scale)
    if getattr(config, "lm_head_multiplier", None) is not None:  # Falcon-H1
        return float(config.lm_head_multiplier)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    # Granite divides by the value of that name, others (HyperCLOVA X) multiply.
    return 1.0 / float(scaling) if config.model_type.startswith("granite") else float(scaling)


def prove_head(model: PreTrainedModel, decoder: nn.Module, head: HeadSpec, device: torch.device) -> None:
    """Compare our reading of the head with the model's logits on eight tokens.

    Both use the model's own forward, so hidden states are the same and only the head differs.

    Raises
    ------
    UnsupportedModelError
        The largest difference over the whole vocabulary exceeds the rounding of the model's dtype.
    """
    ids = (torch.arange(1, 9, device=device) * 37 % min(head.vocab_rows, 1000))[None]
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state[0, -1].to(head.weight.device).float()
    theirs = model(input_ids=ids, use_cache=False, **keep).logits[0, -1].float().to(head.weight.device)
    ours = torch.cat([rows.float() @ hidden for rows in head.weight.split(_TILE)])
    if head.bias is not None:
        ours = ours + head.bias.float()
    ours = ours * head.scale
    if head.softcap is not None:
        ours = head.softcap * torch.tanh(ours / head.softcap)
    size = max(1.0, theirs.abs().max().item())
    error = (ours - theirs).abs().max().item() / size
    # One rounding of the logits, plus the accumulation order of the projection.
    tolerance = 1e-3 if head.weight.dtype == torch.float32 else 4 * torch.finfo(head.weight.dtype).eps
    if not error <= tolerance:  # also catches NaN
        raise UnsupportedModelError(
            f"the output head of {type(model).__name__} is not what its configuration describes: logits differ by "
            f"{error:.2e} of their size (limit {tolerance:.0e}). Known transforms are bias, scale and soft-cap"
        )

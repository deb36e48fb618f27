"""Random-weight models with the shapes of real ones, and what a forward of them costs on paper."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks.gpu.prompts import visible_pairs
from benchmarks.gpu.recorder import NotHereError
from gatekern.engine.backbone import Backbone
from gatekern.engine.head import text_parts
from gatekern.errors import BackendError
from gatekern.planning import PrefixTree


@dataclass(frozen=True)
class Shape:
    """A model's shape, and how many of its layers are measured.

    Attributes
    ----------
    layers, measured : int
        Of the model, and of those so many that weights stay under 24 GB in bf16 and a forward under a second or so.
    contexts : int
        Contexts of 1,000 tokens with 20 facts each in one call.
    fields : dict
        Of its configuration class `family`.
    """

    name: str
    family: str
    layers: int
    measured: int
    fields: dict[str, Any] = field(repr=False)
    contexts: int = 16

    def config(self) -> PreTrainedConfig:
        fields = {"max_position_embeddings": 131_072, "pad_token_id": None} | self.fields
        config: PreTrainedConfig = getattr(transformers, self.family)(num_hidden_layers=self.measured, **fields)
        return config


def fields_of(vocab: int, width: int, inner: int, heads: int, kv_heads: int, dim: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, **more,
    }  # fmt: skip


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SMOLLM2 = Shape("SmolLM2-135M", "LlamaConfig", 30, 30, fields_of(49_152, 576, 1536, 9, 3, 64, **TIED))
QWEN_05B = Shape("Qwen2.5-0.5B", "Qwen2Config", 24, 24, fields_of(151_936, 896, 4864, 14, 2, 64, **TIED))
LLAMA_1B = Shape("Llama-3.2-1B", "LlamaConfig", 16, 16, fields_of(128_256, 2048, 8192, 32, 8, 64, **TIED))
QWEN_8B = Shape("Qwen3-8B", "Qwen3Config", 36, 36, fields_of(151_936, 4096, 12_288, 32, 8, 128, **UNTIED))
#: The backbones of the ConsistencyGate paper.
QWEN_32B = Shape("Qwen2.5-32B", "Qwen2Config", 64, 8, fields_of(152_064, 5120, 27_648, 40, 8, 128, **UNTIED))
LLAMA_70B = Shape("Llama-3.3-70B", "LlamaConfig", 80, 4, fields_of(128_256, 8192, 28_672, 64, 8, 128, **UNTIED))
GEMMA_31B = Shape(
    "Gemma4-31B", "Gemma4TextConfig", 60, 6,
    fields_of(262_144, 5376, 21_504, 32, 16, 256, global_head_dim=512, num_global_key_value_heads=4,
            attention_k_eq_v=True, sliding_window=1024, final_logit_softcapping=30.0, hidden_size_per_layer_input=0,
            **TIED),
)  # fmt: skip
#: transformers runs every token through all 16 experts, in both forms alike.
SCOUT = Shape(
    "Llama4-Scout-17B-16E", "Llama4TextConfig", 48, 4,
    fields_of(202_048, 5120, 8192, 40, 8, 128, intermediate_size_mlp=16_384, num_local_experts=16, **UNTIED),
    contexts=4,
)  # fmt: skip
TINY = Shape("tiny", "LlamaConfig", 4, 2, fields_of(500, 64, 128, 4, 2, 16, **UNTIED), contexts=2)


def build(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model with random weights, created on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    return model


def wrap(model: PreTrainedModel, **options: Any) -> Backbone:
    """A backbone with options that this version of it may not have."""
    missing = set(options) - set(inspect.signature(Backbone.__init__).parameters)
    if missing:
        raise NotHereError(f"Backbone has no option {', '.join(sorted(missing))}")
    try:
        backbone = Backbone(model, **options)
    except BackendError as error:
        if str(error).startswith("prefix_attention: "):  # the dispatcher: this form does not take these operands
            raise
        raise AssertionError(f"the load-time proof failed: {error}") from error
    assert backbone.path == "packed", f"the load-time proof refused the packed path; {backbone.path} is left"
    return backbone


def linear_parameters(model: PreTrainedModel) -> int:
    """Weights that a token is multiplied with outside embedding and head; of experts, those that it is routed to."""
    config = model.config.get_text_config(decoder=True)
    experts = getattr(config, "num_local_experts", None)
    share = config.num_experts_per_tok / experts if experts else 1.0
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    return int(
        sum(
            parameter.numel() * (share if ".experts." in name else 1.0)
            for name, parameter in model.named_parameters()
            if id(parameter) not in outside
        )
    )


def attention_flops(model: PreTrainedModel, tree: PrefixTree) -> int:
    """``4 * heads * dim * pairs`` of every layer, of the keys that its window shows."""
    config = model.config.get_text_config(decoder=True)
    layers = _attention_modules(model)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    return sum(
        4 * layer.q_proj.out_features * visible_pairs(tree, window)
        for layer, window in zip(layers, windows, strict=True)
    )


def _attention_modules(model: PreTrainedModel) -> list[Any]:
    return [layer.self_attn for layer in text_parts(model)[1].layers]


def predicted_seconds(
    model: PreTrainedModel, tokens: int, linear: int, attention: int, forwards: int, *, compiled: bool
) -> float | None:
    """The time model written down before any GPU run; constants of an H200, None for mixtures of experts.

    ``2 * linear * T / (u * 790e12) + attention / 300e12 + L * T * B / 4.3e12``, or the launches of ``L * n`` kernels at
    6 us where those take longer. ``u`` is 0.5 below a width of 2048, 0.7 below 4096, 0.85 from there; ``n`` is 40 eager
    and 10 compiled; ``B``, bytes of elementwise work, is ``84 H + 10 I + 24 (Hq + Hkv) D`` (with norms of query and key
    ``36 (Hq + Hkv) D`` more) eager and ``16 H + 6 I + 4 (Hq + Hkv) D`` compiled.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_local_experts", None):
        return None
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    projected = sum(x.q_proj.out_features + x.k_proj.out_features for x in _attention_modules(model)) / layers
    use = 0.5 if width < 2048 else 0.7 if width < 4096 else 0.85
    moved = 84 * width + 10 * inner + 24 * projected
    if config.model_type.startswith(("qwen3", "gemma")):
        moved += 36 * projected
    if compiled:
        moved = 16 * width + 6 * inner + 4 * projected
    device = 2 * linear * tokens / (use * 790e12) + attention / 300e12 + layers * tokens * moved / 4.3e12
    return max(device, forwards * layers * (10 if compiled else 40) * 6e-6)

"""Random-weight models with the shapes of real ones, and the least that a forward of them computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.attention import pairs
from gatekern.engine.head import text_config, text_parts
from gatekern.layout import IntArray


@dataclass(frozen=True)
class Shape:
    """A model's shape; of its `layers` so many are `measured` that weights stay under 24 GB in bf16.

    Where that is a part of them, the last one stands for those that follow: it is not pruned.

    `more` are fields of the configuration `family`; `contexts` of 1,000 tokens with 20 facts each are one call.
    """

    name: str
    family: str
    layers: int
    measured: int
    vocab: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    tied: bool = False
    contexts: int = 16
    more: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def whole(self) -> bool:
        return self.measured == self.layers

    def build(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """The model with random weights, created on the device."""
        config = getattr(transformers, self.family)(
            num_hidden_layers=self.measured, vocab_size=self.vocab, hidden_size=self.width,
            intermediate_size=self.inner, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.dim, tie_word_embeddings=self.tied, max_position_embeddings=131_072, pad_token_id=None,
            **self.more,
        )  # fmt: skip
        with torch.device(device):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for layer in text_parts(model)[1].layers:
            attention = layer.self_attn
            if attention.scaling == 1.0:  # learned: with fresh weights one key would take all, and rounding choose it
                nn.init.constant_(attention.q_norm.weight, attention.head_dim**-0.5)
        return model.eval()


QWEN_05B = Shape("Qwen2.5-0.5B", "Qwen2Config", 24, 24, 151_936, 896, 4864, 14, 2, 64, tied=True)
LLAMA_1B = Shape("Llama-3.2-1B", "LlamaConfig", 16, 16, 128_256, 2048, 8192, 32, 8, 64, tied=True)
QWEN_8B = Shape("Qwen3-8B", "Qwen3Config", 36, 36, 151_936, 4096, 12_288, 32, 8, 128)
SMOLLM2 = Shape("SmolLM2-135M", "LlamaConfig", 30, 30, 49_152, 576, 1536, 9, 3, 64, tied=True)
#: The backbones of the ConsistencyGate paper.
QWEN_32B = Shape("Qwen2.5-32B", "Qwen2Config", 64, 8, 152_064, 5120, 27_648, 40, 8, 128)
LLAMA_70B = Shape("Llama-3.3-70B", "LlamaConfig", 80, 4, 128_256, 8192, 28_672, 64, 8, 128)
GEMMA_31B = Shape(
    "Gemma4-31B", "Gemma4TextConfig", 60, 6, 262_144, 5376, 21_504, 32, 16, 256, tied=True,
    more={"global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024,
          "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0},
)  # fmt: skip
#: transformers runs every token through all 16 experts, in all forms alike.
SCOUT = Shape(
    "Llama4-Scout-17B-16E", "Llama4TextConfig", 48, 4, 202_048, 5120, 8192, 40, 8, 128, contexts=4,
    more={"intermediate_size_mlp": 16_384, "num_local_experts": 16},
)  # fmt: skip
ALL = (QWEN_05B, LLAMA_1B, QWEN_8B, SMOLLM2, QWEN_32B, LLAMA_70B, GEMMA_31B, SCOUT)
TINY = Shape("tiny", "LlamaConfig", 2, 2, 500, 64, 128, 4, 2, 16, contexts=2)


def least_flops(model: PreTrainedModel, positions: IntArray, read: IntArray) -> float:
    """Of a forward over tokens at `positions` whose final hidden states are wanted at those of the positions `read`.

    ``2 * weights * tokens`` outside embedding and head, plus ``4 * heads * dim * pairs`` of attention in every layer.
    In the last layer only keys and values are wanted of all tokens, everything else of those that are read.
    """
    config, layers = text_config(model.config), text_parts(model)[1].layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    experts = getattr(config, "num_local_experts", None)
    share = config.num_experts_per_tok / experts if experts else 1.0

    def weights(part: nn.Module | None) -> float:
        """Of a module those that a token is multiplied with: of experts, those that it is routed to."""
        named = [] if part is None else part.named_parameters()
        return sum(one.numel() * (share if ".experts." in name else 1.0) for name, one in named)

    total = 0.0
    for layer, kind in zip(layers, kinds, strict=True):
        attention = layer.self_attn
        rows = read if layer is layers[-1] else positions
        keys_values = weights(attention.k_proj) + weights(attention.v_proj)
        window = config.sliding_window if kind == "sliding_attention" else None
        total += 2 * keys_values * len(positions) + 2 * (weights(layer) - keys_values) * len(rows)
        total += 4 * attention.q_proj.out_features * pairs(rows, window)
    return total

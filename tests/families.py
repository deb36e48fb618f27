"""Tiny random models of every family in the support matrix.

Weights are redrawn N(0, 0.25): with the default initialisation logits are nearly uniform and most cache and mask
errors stay invisible. Windows and chunks are short so that prompts of tens of tokens cross them.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 97
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}

#: model_type -> (class prefix, what differs from the common shape)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", _MOE),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {**_ALTERNATING, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0,
                          "query_pre_attn_scalar": 12}),
    "gemma3_text": ("Gemma3", {**_ALTERNATING, "query_pre_attn_scalar": 12}),
    "gemma4_text": ("Gemma4", {**_ALTERNATING, "final_logit_softcapping": 7.0, "hidden_size_per_layer_input": 8,
                               "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0, "global_head_dim": 16,
                               "num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    "llama4_text": ("Llama4", {"intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1,
                               "interleave_moe_layer_step": 2, "attention_chunk_size": WINDOW, "floor_scale": 6,
                               "attn_scale": 0.7, "attn_temperature_tuning": True, "no_rope_layers": [1, 0, 1, 0]}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "granite": ("Granite", {"logits_scaling": 3.0, "attention_multiplier": 0.3, "embedding_multiplier": 2.0,
                            "residual_multiplier": 0.7}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {**_ALTERNATING, "logit_scale": 0.25}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}),
    "gpt_oss": ("GptOss", {**_ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", {}),
    "gpt2": ("GPT2", {}),
    "gpt_neox": ("GPTNeoX", {}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "glm4": ("Glm4", {"partial_rotary_factor": 0.5}),
    "exaone4": ("Exaone4", {**_ALTERNATING}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5}),
    "nemotron": ("Nemotron", {"partial_rotary_factor": 0.5}),
    "biogpt": ("BioGpt", {}),
    "olmo3": ("Olmo3", {**_ALTERNATING}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2}),
    "deepseek_v3": ("DeepseekV3", {"num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4,
                                   "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                                   "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
                                   "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}),
    "qwen3_next": ("Qwen3Next", {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 24}),
    "qwen3_5_text": ("Qwen3_5", _LINEAR),
    "falcon_h1": ("FalconH1", {**_MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**_MAMBA, "layer_types": ["mamba", "attention"] * 2,
                                              "num_local_experts": 4, "num_experts_per_tok": 2,
                                              "shared_intermediate_size": 24, "logits_scaling": 3.0}),
    "jamba": ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
                        "mamba_dt_rank": 4, "use_mamba_kernels": False}),
    "bloom": ("Bloom", {}),
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> transformers.PreTrainedConfig:
    """Configuration of the tiny model; `changes` override it."""
    prefix, special = FAMILIES[family]
    name = f"{prefix}TextConfig" if family.endswith("_text") else f"{prefix}Config"
    return getattr(transformers, name)(**{**_COMMON, **special, **changes})


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny random causal language model in eval mode."""
    config = tiny_config(family, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    return model.to(dtype).eval()

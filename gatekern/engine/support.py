"""Which architectures are scored on which path, and why.

`packed` is the fast path. `branched` is exact and slower: shared tokens are computed once, then the model's cache is
copied for every fact. `full` computes every prompt whole. A model that fits none is refused by name. Whatever this
table says, `Backbone` proves the path on the loaded model before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from gatekern.engine.head import text_config

Path = Literal["packed", "branched", "full", "refused"]

#: Families that the test suite compares with separate, uncached, unpadded forwards on every run.
TESTED: dict[Path, tuple[str, ...]] = {
    "packed": (
        "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "gemma4_text",
        "llama4_text", "phi", "phi3", "granite", "cohere", "cohere2", "smollm3", "gpt_oss", "olmo2", "gpt2",
        "gpt_neox", "opt", "starcoder2", "glm4", "exaone4", "stablelm", "nemotron", "biogpt", "olmo3", "granitemoe",
        "deepseek_v3",
    ),
    "branched": (
        "qwen3_next", "qwen3_5_text", "falcon_h1", "lfm2", "granitemoehybrid", "mamba2", "bloom",
    ),
    "full": ("jamba",),
    "refused": ("t5", "bert"),
}  # fmt: skip

_PACKABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"}
_IGNORES_IS_DECODER = {"gpt_neox", "gpt_neox_japanese", "trocr"}  # causal whatever their configuration says
_NOT_CONTINUED = {"jamba", "mamba"}  # several tokens on a filled cache give other states than the whole prompt
_SPARSE_LAYERS = {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"}


@dataclass(frozen=True)
class Support:
    """How a model is scored.

    Attributes
    ----------
    path : "packed", "branched", "full" or "refused"
    reason : str
        Why it is not the fast path, or what the fast path rests on.
    packed_limit : int or None
        Longer prompts are computed whole and alone, because their rotary angles depend on the longest prompt of the
        call.
    """

    path: Path
    reason: str
    packed_limit: int | None = None


def support_for(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> Support:
    """What an architecture allows, before any weight is loaded."""
    encoder_decoder = config.is_encoder_decoder
    config = text_config(config)
    if encoder_decoder:
        return Support("refused", "encoder-decoder models read the prompt in an encoder; gatekern scores decoders")
    if getattr(config, "is_decoder", None) is False and config.model_type not in _IGNORES_IS_DECODER:
        return Support("refused", "an encoder (is_decoder=False): its tokens see later ones")
    kinds = _layer_kinds(config)
    if kinds & _SPARSE_LAYERS:
        return Support("full", f"{', '.join(sorted(kinds & _SPARSE_LAYERS))} layers select keys over the whole prompt")
    if config.model_type in _NOT_CONTINUED:
        return Support("full", f"transformers does not continue {config.model_type} exactly from a cached prefix")
    if kinds - _PACKABLE_LAYERS:
        return Support("branched", f"{', '.join(sorted(kinds - _PACKABLE_LAYERS))} layers carry a state across tokens")
    if not model_class._can_set_attn_implementation():
        return Support("branched", f"{config.model_type} does not call attention through AttentionInterface")
    limit = _packed_limit(config)
    if limit is not None:
        return Support(
            "packed", f"prompts over {limit} tokens alone: rotary angles depend on the longest prompt", limit
        )
    return Support("packed", "attention only, angles depend on a token's own position")


def support_matrix() -> dict[str, Support]:
    """Every causal language model of the installed transformers, by model type, with its default configuration."""
    matrix: dict[str, Support] = {}
    classes: list[tuple[Any, Any]] = list(MODEL_FOR_CAUSAL_LM_MAPPING.items())
    for config_class, model_class in classes:
        try:
            matrix[config_class.model_type] = support_for(config_class(), model_class)
        except Exception as error:  # some configurations have no defaults, or need other packages
            reason = f"depends on the checkpoint ({type(error).__name__} for the default configuration)"
            matrix[config_class.model_type] = Support("full", reason)
    return dict(sorted(matrix.items()))


def max_prompt_tokens(model: PreTrainedModel) -> int | None:
    """Longest prompt that the model's positions allow, tokens; None when the configuration states none."""
    config = text_config(model.config)
    for name in ("max_position_embeddings", "max_seq_len"):  # the second is MPT's
        limit = getattr(config, name, None)
        if limit is not None:
            return int(limit)
    return None


def _layer_kinds(config: PreTrainedConfig) -> set[str]:
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if kinds:
            return {"full_attention" if kind == "attention" else kind for kind in kinds}
    stateful = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}
    return {"recurrent"} if config.model_type in stateful else {"full_attention"}


def _packed_limit(config: PreTrainedConfig) -> int | None:
    """Length from which `dynamic` and `longrope` embeddings change all angles of a call."""
    rope = getattr(config, "rope_parameters", None) or {}
    per_kind = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = [
        int(one.get("original_max_position_embeddings") or config.max_position_embeddings)
        for one in per_kind
        if one.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)

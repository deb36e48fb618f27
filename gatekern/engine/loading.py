"""Model and tokenizer from a path or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gatekern.errors import InputError

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def load(
    name_or_path: str | Path,
    *,
    device: str,
    dtype: str | torch.dtype,
    gguf_file: str | None,
    **model_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in eval mode, and its tokenizer.

    A path to a ``.gguf`` file works as it is. Keyword arguments that both `from_pretrained` calls know (``revision``,
    ``trust_remote_code``, ``token``, ``cache_dir``) reach both, the others the model.
    """
    path = Path(name_or_path)
    if path.suffix == ".gguf" and gguf_file is None:
        if not path.is_file():
            raise InputError(f"no such file: {path}")
        name_or_path, gguf_file = path.parent, path.name
    target = _device(device)
    common = {k: v for k, v in model_kwargs.items() if k in ("revision", "trust_remote_code", "token", "cache_dir")}
    if gguf_file is not None:
        common["gguf_file"] = gguf_file
        if hasattr(transformers, "GgufConfig"):  # newer versions may keep weights packed; the head must be plain
            model_kwargs.setdefault("quantization_config", transformers.GgufConfig(dequantize=True))
    wanted = _dtype(dtype, target)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name_or_path), **common)
        model = AutoModelForCausalLM.from_pretrained(str(name_or_path), dtype=wanted, **{**model_kwargs, **common})
    except (ImportError, OSError, ValueError) as error:  # how transformers says not found, no package, wrong file
        raise InputError(f"cannot load a causal language model from {name_or_path}: {error}") from error
    model.eval()
    if "device_map" not in model_kwargs:
        model.to(target)  # type: ignore[arg-type]  # a decorator hides the method's self
    return model, tokenizer


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
        torch.empty(0, device=target)  # before minutes of loading
    except (AssertionError, RuntimeError) as error:
        raise InputError(f"device={device!r} cannot be used here: {error}") from error
    return target


def _dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """`auto` is the checkpoint's dtype on accelerators and float32 on the CPU, where it is the exact choice."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in _DTYPES:
        raise InputError(f"dtype={dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]

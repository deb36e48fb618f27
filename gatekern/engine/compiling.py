"""Decoder layers compiled one by one (regional `torch.compile`), without changing the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gatekern.errors import UnsupportedModelError

CompiledLayers = Mapping[nn.Module, Callable[..., Any]]


def compiled_layers(decoder: nn.Module, *, but: nn.Module | None = None) -> CompiledLayers:
    """A compiled call for each decoder layer. Layers of one class share their code, so one compilation serves all.

    Attention stays one opaque operator inside (`gatekern.engine.attention`); norms, rotary embedding and activations
    around the products are fused. The number of tokens is dynamic: other lengths compile nothing anew. `but` is
    left out.

    Raises
    ------
    UnsupportedModelError
        The decoder is not made of transformers' layers.
    """
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UnsupportedModelError(
            f"compile=True: {type(decoder).__name__} has no decoder layers that can be compiled"
        )
    return {layer: torch.compile(layer._call_impl, dynamic=True) for layer in layers if layer is not but}


@contextmanager
def in_place_of(compiled: CompiledLayers) -> Iterator[None]:
    """Call the layers as compiled inside the block."""
    before: dict[nn.Module, Callable[..., Any] | None] = {layer: layer._compiled_call_impl for layer in compiled}
    try:
        for layer, call in compiled.items():
            layer._compiled_call_impl = call  # where `nn.Module.compile` puts it
        yield
    finally:
        for layer, usual in before.items():
            layer._compiled_call_impl = usual

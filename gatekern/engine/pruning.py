"""The last decoder layer on the rows that are read, and on no others.

After the last layer's keys and values nothing but those rows is needed: neither queries, attention and projections of
the other rows in that layer, nor the final norm. No model is rewritten: a hook before the layer runs its attention once
for the keys and values of all rows, and then lets the layer go on with the rows that are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gatekern.engine.attention import ForwardState, KeysKnown
from gatekern.errors import UnsupportedModelError
from gatekern.layout import IntArray


def last_layer(decoder: nn.Module) -> nn.Module:
    """The decoder's last layer.

    Raises
    ------
    UnsupportedModelError
        It does not begin with a norm and attention under the usual names.
    """
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not (hasattr(layers[-1], "input_layernorm") and hasattr(layers[-1], "self_attn")):
        name = type(layers[-1] if layers else decoder).__name__
        raise UnsupportedModelError(f"prune_last_layer=True: {name} does not begin with input_layernorm and self_attn")
    return layers[-1]


@contextmanager
def pruned(layer: nn.Module, state: ForwardState, rows: IntArray) -> Iterator[None]:
    """Run `layer` on `rows` (int64 [num_read], ascending) of the stream only, inside the block."""

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden = args[0]
        index = torch.from_numpy(rows).to(hidden.device)
        state.last_rows = rows
        try:
            module.self_attn(hidden_states=module.input_layernorm(hidden), **kwargs)
        except KeysKnown:
            return _take(args, index, hidden.shape[1]), _take(kwargs, index, hidden.shape[1])
        raise UnsupportedModelError(f"{type(module).__name__} calls attention in a way that cannot be pruned")

    handle = layer.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _take(value: Any, rows: Tensor, num_rows: int) -> Any:
    """Those rows of every tensor ``[1, num_rows, ...]`` in a nest of tuples and dictionaries."""
    if isinstance(value, Tensor):
        return value.index_select(1, rows) if value.ndim >= 2 and value.shape[1] == num_rows else value
    if isinstance(value, tuple):
        return tuple(_take(one, rows, num_rows) for one in value)
    if isinstance(value, Mapping):
        return {name: _take(one, rows, num_rows) for name, one in value.items()}
    return value

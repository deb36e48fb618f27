"""The attention function that a Hugging Face model calls while gatekern runs a packed forward.

Every attention module of transformers looks its function up by name in `AttentionInterface` and hands it projected,
rotated, un-repeated queries, keys and values. We register one function and give it the current forward's layout
through a context variable, because some models drop unknown keyword arguments on the way down.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from gatekern.errors import BackendError, UnsupportedModelError
from gatekern.layout import SegmentLayout
from gatekern.ops.prefix_attention import prefix_attention

NAME = "gatekern"  # the key in AttentionInterface; transformers gives names with "sdpa" or "flash" a special meaning

KeyValue = tuple[Tensor, Tensor]


@dataclass
class ForwardState:
    """What the attention function needs to know about the forward that is running.

    Attributes
    ----------
    layout : SegmentLayout
        Who sees whom.
    borrowed : dict of int to (key, value)
        Per layer, keys and values ``[num_borrowed, num_kv_heads, head_dim]`` of segments computed earlier.
    keep : tuple of (k_begin, k_end)
        Ranges of the key axis that a later forward will borrow.
    kept : dict of int to (key, value)
        Filled in by the layers: those ranges, one after the other.
    """

    layout: SegmentLayout
    borrowed: dict[int, KeyValue] = field(default_factory=dict)
    keep: tuple[tuple[int, int], ...] = ()
    kept: dict[int, KeyValue] = field(default_factory=dict)
    layers_run: set[int] = field(default_factory=set)


_current: ContextVar[ForwardState | None] = ContextVar("gatekern_forward", default=None)


@contextmanager
def packed_attention(decoder: nn.Module, state: ForwardState) -> Iterator[None]:
    """Route the decoder's attention through `prefix_attention` inside the block, and restore it after."""
    found: list[Any] = [module.config for module in decoder.modules() if hasattr(module, "config")]
    configs = list({id(config): config for config in found}.values())
    before = [config._attn_implementation for config in configs]
    token = _current.set(state)
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        _current.reset(token)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`AttentionInterface` signature: query ``[1, heads, rows, dim]`` in, ``[1, rows, heads, dim]`` out."""
    state = _current.get()
    if state is None:
        raise BackendError(
            "the model was called from another thread while gatekern scores with it; "
            "give each thread its own model, or wait until score_batch returns"
        )
    layer = getattr(module, "layer_idx", None)
    if attention_mask is not None or layer is None or layer in state.layers_run:
        raise UnsupportedModelError(
            f"{type(module).__name__} calls attention in a way that cannot be packed "
            f"(own mask: {attention_mask is not None}, layer index: {layer})"
        )
    state.layers_run.add(layer)

    rows_first = [x[0].transpose(0, 1) for x in (query, key, value)]
    q, k, v = rows_first
    q = _position_scaled(module, q, state.layout)
    if layer in state.borrowed:
        k, v = (torch.cat(pair) for pair in zip(state.borrowed[layer], (k, v), strict=True))
    if state.keep:
        state.kept[layer] = tuple(torch.cat([x[a:b] for a, b in state.keep]) for x in (k, v))  # type: ignore[assignment]

    window, chunk = _reach(module, layer, sliding_window)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = prefix_attention(q, k, v, state.layout, scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=s_aux)
    return out[None], None


def _reach(module: Any, layer: int, sliding_window: int | None) -> tuple[int | None, int | None]:
    """Sliding window and chunk size of this layer. Models may express either in their mask only, so ask the config."""
    config = module.config
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[layer] if layer_types else None
    if kind == "sliding_attention" and sliding_window is None:
        sliding_window = config.sliding_window
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    return sliding_window, chunk


def _position_scaled(module: Any, query: Tensor, layout: SegmentLayout) -> Tensor:
    """Undo and redo Llama 4's temperature on layers without rotary embedding.

    Those layers scale queries by ``1 + a * log(1 + floor((p + 1) / b))`` but take the index in the stream for the
    position ``p``. In a packed stream the two differ.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query

    def temperature(positions: Tensor) -> Tensor:
        steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
        return 1.0 + float(module.attn_scale) * torch.log1p(steps)

    true = torch.from_numpy(layout.row_positions).to(query.device)
    assumed = torch.arange(layout.num_rows, device=query.device)
    ratio = temperature(true) / temperature(assumed)
    return (query.float() * ratio[:, None, None]).to(query.dtype)


AttentionInterface.register(NAME, _attention)

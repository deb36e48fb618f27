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
from gatekern.layout import IntArray, SegmentLayout
from gatekern.ops import dispatch
from gatekern.ops.prefix_attention import prefix_attention

NAME = "gatekern"  # the key in AttentionInterface; transformers gives names with "sdpa" or "flash" a special meaning

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Layer:
    """What one attention layer does beside the dot products.

    Attributes
    ----------
    index : int
        As the model counts its layers.
    window, chunk : int or None
        How far it sees; see `gatekern.ops.prefix_attention`.
    temperature : tuple of (scale, floor) or None
        Of queries by position, in Llama 4's layers without rotary embedding.
    """

    index: int
    window: int | None
    chunk: int | None
    temperature: tuple[float, float] | None


@dataclass
class ForwardState:
    """What the attention function needs to know about the forward that is running.

    Attributes
    ----------
    layout : SegmentLayout
        Who sees whom.
    borrowed : dict of int to (key, value)
        Per layer, keys and values ``[num_borrowed, num_kv_heads, head_dim]`` of segments computed earlier. Layers are
        numbered in the order in which they call.
    keep : tuple of (k_begin, k_end)
        Ranges of the key axis that a later forward will borrow.
    kept : dict of int to (key, value)
        Filled in by the layers: those ranges, one after the other.
    backend : str
        For `prefix_attention`.
    invariant : bool
        Likewise.
    layers : list of Layer
        The model's layers in the order in which they call; empty for a first forward, which fills it in.
    calls : int
        How many have called so far.
    last_rows : int64 [num_read] or None
        Rows that the last layer goes on with; see `gatekern.engine.pruning`.
    last_keys : tuple of (key, value) or None
        Of all rows in the last layer, once they are known.
    """

    layout: SegmentLayout
    borrowed: dict[int, KeyValue] = field(default_factory=dict)
    keep: tuple[tuple[int, int], ...] = ()
    kept: dict[int, KeyValue] = field(default_factory=dict)
    backend: str = "auto"
    invariant: bool = False
    layers: list[Layer] = field(default_factory=list)
    calls: int = 0
    last_rows: IntArray | None = None
    last_keys: KeyValue | None = None


class KeysKnown(Exception):  # noqa: N818  # not an error
    """Ends the first of two calls of a pruned last layer."""


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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():  # one opaque operator, which a first, plain forward has told about the layers
        out: Tensor = torch.ops.gatekern.layer_attention(query, key, value, scale, softcap, s_aux)
        return out, None
    _get_acquainted(module, attention_mask, sliding_window)
    return _layer_attention(query, key, value, scale, softcap, s_aux), None


def _get_acquainted(module: Any, attention_mask: Tensor | None, sliding_window: int | None) -> None:
    """Check that the layer can be packed, and note what it is when it calls for the first time."""
    if _state().last_keys is not None:  # the second call of the last layer
        return
    layers = _state().layers
    index = getattr(module, "layer_idx", None)
    first = _state().calls == len(layers)
    if attention_mask is not None or index is None or (first and index in {layer.index for layer in layers}):
        raise UnsupportedModelError(
            f"{type(module).__name__} calls attention in a way that cannot be packed "
            f"(own mask: {attention_mask is not None}, layer index: {index})"
        )
    if first:
        layers.append(Layer(index, *_reach(module, index, sliding_window), _temperature(module)))


def _layer_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of the next layer of the forward that is running."""
    state = _state()
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if state.last_keys is None:
        at = state.calls
        state.calls += 1
        if at in state.borrowed:
            k, v = (torch.cat(pair) for pair in zip(state.borrowed[at], (k, v), strict=True))
        if state.keep:
            state.kept[at] = tuple(torch.cat([x[a:b] for a, b in state.keep]) for x in (k, v))  # type: ignore[assignment]
        if state.last_rows is not None:
            state.last_keys = k, v
            state.layout = state.layout.of_rows(state.last_rows)
            raise KeysKnown
    else:
        k, v = state.last_keys
    layer = state.layers[state.calls - 1]
    if layer.temperature is not None:
        q = _position_scaled(layer.temperature, q, state.layout)
    return prefix_attention(
        q,
        k,
        v,
        state.layout,
        scale=scale,
        window=layer.window,
        chunk=layer.chunk,
        softcap=softcap,
        sinks=sinks,
        backend=state.backend,
        invariant=state.invariant,
    )[None]


def _state() -> ForwardState:
    state = _current.get()
    if state is None:
        raise BackendError(
            "the model was called from another thread while gatekern scores with it; "
            "give each thread its own model, or wait until score_batch returns"
        )
    return state


def _reach(module: Any, layer: int, sliding_window: int | None) -> tuple[int | None, int | None]:
    """Sliding window and chunk size of this layer. Models may express either in their mask only, so ask the config."""
    config = module.config
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[layer] if layer_types else None
    if kind == "sliding_attention" and sliding_window is None:
        sliding_window = config.sliding_window
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    return sliding_window, chunk


def _temperature(module: Any) -> tuple[float, float] | None:
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return None
    return float(module.attn_scale), float(module.floor_scale)


def _position_scaled(temperature: tuple[float, float], query: Tensor, layout: SegmentLayout) -> Tensor:
    """Undo and redo Llama 4's temperature on layers without rotary embedding.

    Those layers scale queries by ``1 + a * log(1 + floor((p + 1) / b))`` but take the index in the stream for the
    position ``p``. In a packed stream the two differ.
    """
    scale, floor = temperature

    def factor(positions: Tensor) -> Tensor:
        return 1.0 + scale * torch.log1p(torch.floor((positions.float() + 1.0) / floor))

    name = ("row_positions", query.device)
    if name not in layout.derived:
        layout.derived[name] = torch.from_numpy(layout.row_positions).to(query.device)
    true: Tensor = layout.derived[name]
    assumed = torch.arange(layout.num_rows, device=query.device)
    ratio = factor(true) / factor(assumed)
    return (query.float() * ratio[:, None, None]).to(query.dtype)


AttentionInterface.register(NAME, _attention)

dispatch.LIBRARY.define(  # type: ignore[no-untyped-call]
    "layer_attention(Tensor query, Tensor key, Tensor value, float scale, float? softcap, Tensor? sinks) -> Tensor"
)
torch.library.impl(dispatch.LIBRARY, "layer_attention", "CompositeExplicitAutograd")(_layer_attention)


@torch.library.register_fake("gatekern::layer_attention")  # type: ignore[untyped-decorator]
def _layer_attention_fake(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

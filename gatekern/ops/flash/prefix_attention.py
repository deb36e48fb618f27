"""`gatekern.ops.prefix_attention` by FlashAttention's kernels: a few calls, merged by their log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

from gatekern.errors import InputError
from gatekern.layout import SegmentLayout
from gatekern.ops.flash.plan import Call, Index, has_branches, plan_of
from gatekern.ops.flash.varlen import Varlen, find, provider
from gatekern.ops.merge_attention import merge_attention

_MAX_DIM = 256


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SegmentLayout,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    varlen: Varlen | None = None,
) -> Tensor:
    """Attention of every row over its path in the prefix tree, as `gatekern.ops.prefix_attention`.

    Parameters
    ----------
    query : Tensor [num_rows, num_heads, head_dim]
        Bfloat16 or float16; any strides with a dense last dimension. `unfit` says what else does not fit.
    key : Tensor [num_keys, num_kv_heads, head_dim]
        Same dtype and device.
    value : Tensor [num_keys, num_kv_heads, head_dim]
        As `key`.
    layout : SegmentLayout
        Which rows see which keys. The calls to make are computed from it once.
    scale : float
        Multiplies the dot products.
    window : int, optional
        Sliding window, in positions.
    chunk : int, optional
        Chunked attention; only where all positions are in the first chunk.
    softcap : float, optional
        Cap of the scores.
    sinks : Tensor [num_heads], optional
        Logit of a key with zero value that every row sees.
    varlen : Varlen, optional
        What computes; by default what is installed.

    Returns
    -------
    Tensor [num_rows, num_heads, head_dim]
        In the dtype of `query`. Partial results are merged in float32 and rounded to that dtype after each merge, as
        FlashAttention rounds them. Not differentiable.

    Raises
    ------
    InputError
        If the layer's options do not fit the layout or the provider.
    BackendError
        If there is no provider.
    """
    varlen = varlen or provider()
    reason = _unfit_options(layout, window, chunk, softcap, varlen)
    if reason is not None:
        raise InputError(reason)
    window = window if _cuts(layout, window) else None
    plan = plan_of(layout, window, query.device)

    def attend(call: Call) -> tuple[Tensor, Tensor]:
        return varlen(
            _take(query, call.rows),
            _take(key, call.keys),
            _take(value, call.keys),
            call.row_offsets,
            call.key_offsets,
            call.max_rows,
            call.max_keys,
            scale=scale,
            causal=call.causal,
            window=window,
            softcap=softcap,
        )

    with torch.no_grad():
        out, lse = _joined([attend(call) for call in plan.first])
        for call in plan.more:
            part = attend(call)
            merged = merge_attention(_take(out, call.rows), _take(lse, call.rows), *part)
            out, lse = (_put(x, call.rows, y) for x, y in zip((out, lse), merged, strict=True))
        if sinks is not None:
            out *= torch.sigmoid(lse - sinks.float())[..., None]
    return out


def unfit(
    query: Tensor,
    value: Tensor,
    layout: SegmentLayout,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    varlen: Varlen | None = None,
) -> str | None:
    """Say why these operands of `prefix_attention` do not fit, None when they do."""
    provided = varlen or find()
    if isinstance(provided, str):
        return provided
    head_dim, value_dim = query.shape[2], value.shape[2]
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention takes float16 and bfloat16, not {query.dtype}"
    if head_dim != value_dim:
        return f"FlashAttention needs keys and values of one dimension, got {head_dim} and {value_dim}"
    if head_dim > _MAX_DIM or head_dim % 8:
        return f"FlashAttention takes heads of at most {_MAX_DIM} dimensions, a multiple of 8; got {head_dim}"
    return _unfit_options(layout, window, chunk, softcap, provided)


def _unfit_options(
    layout: SegmentLayout, window: int | None, chunk: int | None, softcap: float | None, varlen: Varlen
) -> str | None:
    if softcap is not None and not varlen.supports_softcap:
        return f"{varlen.name} has no soft-cap"
    if _cuts(layout, chunk):
        return "FlashAttention has no chunked attention"
    if _cuts(layout, window):
        if not varlen.supports_window:
            return f"{varlen.name} has no sliding window"
        if has_branches(layout):
            return "a sliding window over rows that branch within their segment is no window of FlashAttention"
    return None


def _cuts(layout: SegmentLayout, span: int | None) -> bool:
    """Whether a window or chunk of that many positions hides any key."""
    if span is None:
        return False
    longest = layout.derived.get("flash longest")
    if longest is None:
        longest = layout.derived["flash longest"] = int(layout.row_positions.max()) + 1
    return bool(span < longest)


def _take(x: Tensor, index: Index) -> Tensor:
    return x.index_select(0, index) if isinstance(index, Tensor) else x[index]


def _put(x: Tensor, index: Index, values: Tensor) -> Tensor:
    """Replace some rows of `x`: in place, or all of them by `values` themselves."""
    if isinstance(index, Tensor):
        return x.index_copy_(0, index, values)
    if len(values) == len(x):
        return values
    x[index] = values
    return x


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)

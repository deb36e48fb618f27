"""Attention over a packed stream of segments that share prefixes.

The stream is a prefix tree in depth-first preorder (`gatekern.layout`). A row sees the segments above its own and what
precedes it in its own: so attention is one call over the segments themselves, batched, plus one unmasked call for every
segment that others share, whose rows are contiguous. The partial results are merged by their log-sum-exp, as in
Hydragen (arXiv 2402.05099) at any depth of sharing: keys of a shared prefix are read once for all the rows below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gatekern.errors import InputError
from gatekern.layout import SegmentLayout
from gatekern.ops import dispatch
from gatekern.ops.head import DTYPES
from gatekern.ops.pytorch.cascade_attention import cascade_attention
from gatekern.ops.pytorch.path_attention import path_attention

_MAX_DIM = 256  # of a head in the Triton and flash forms


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
    backend: str = "auto",
    invariant: bool = False,
) -> Tensor:
    """Attention of every row over its path in the prefix tree.

    Parameters
    ----------
    query : Tensor [num_rows, num_heads, head_dim]
        float32, bfloat16 or float16; any strides with a dense last dimension.
    key : Tensor [num_keys, num_kv_heads, head_dim]
        Same dtype and device; ``num_heads`` is a multiple of ``num_kv_heads`` (GQA). Rotary embedding already applied.
    value : Tensor [num_keys, num_kv_heads, value_dim]
        As `key`.
    layout : SegmentLayout
        Which rows see which keys.
    scale : float
        Multiplies the dot products.
    window : int, optional
        Sliding window: a row at position ``p`` sees positions ``p - window + 1 .. p``.
    chunk : int, optional
        Chunked attention: a row sees the positions of its own chunk, ``p // chunk``, only.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)`` before the mask.
    sinks : Tensor [num_heads], optional
        Logit of a key with zero value that every row sees (attention sink).

    Returns
    -------
    Tensor [num_rows, num_heads, value_dim]
        In the dtype of `query`; partial results are merged in float32.

    Notes
    -----
    On the CPU, PyTorch's flash kernel does the calls; with a soft-cap, with ``value_dim != head_dim`` and on other
    devices plain matrix products do, in blocks of rows. No mask of all rows by all keys is ever built.

    Examples
    --------
    Two branches of two tokens each below a shared prefix of three:

    >>> from gatekern.layout import layout_of
    >>> layout = layout_of(
    ...     seen=np.array([[0, 7], [1, 7], [2, 7], [3, 5], [4, 5], [5, 7], [6, 7]]),
    ...     key_positions=np.array([0, 1, 2, 3, 4, 3, 4]),
    ...     own_offsets=np.array([0, 3, 5, 7]),
    ...     own=[[(0, 3)], [(3, 5)], [(5, 7)]],
    ...     shared=[((3, 7), [(0, 3)])],
    ... )
    >>> q, k, v = torch.randn(7, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    >>> prefix_attention(q, k, v, layout, scale=0.25).shape
    torch.Size([7, 4, 16])
    """
    check_attention(query, key, value, layout, window, chunk, softcap, sinks)
    unfit = _unfit(query, value, layout, window, chunk, softcap, invariant)
    options: dict[str, Any] = {"scale": scale, "window": window, "chunk": chunk, "softcap": softcap, "sinks": sinks}
    forms: Mapping[str, Callable[..., Tensor]] = {
        "triton": _triton,
        "flash": _flash,
        "torch": path_attention if invariant else cascade_attention,
    }
    launched = {name: partial(form, **options) for name, form in forms.items()}
    with dispatch.plain_arithmetic(query.device):
        return dispatch.run("prefix_attention", backend, query.device, launched, query, key, value, layout, unfit=unfit)


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SegmentLayout,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Check the operands; metadata only, so it costs no device synchronisation.

    Raises
    ------
    InputError
        If a rank, size, dtype or device does not fit.
    """
    shapes = f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 3:
        raise InputError(f"query, key and value must be [rows or keys, heads, head_dim]; {shapes}")
    rows, keys = layout.num_rows, layout.num_keys
    if query.shape[0] != rows or key.shape[0] != keys or value.shape[0] != keys:
        raise InputError(f"the layout has {rows} rows and {keys} keys; {shapes}")
    if key.shape[1] != value.shape[1] or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise InputError(f"key and value need the same heads, and query a multiple of them; {shapes}")
    if query.shape[2] != key.shape[2] or query.shape[2] == 0 or value.shape[2] == 0:
        raise InputError(f"query and key need the same head_dim; {shapes}")
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        dtypes = f"got {query.dtype}, {key.dtype} and {value.dtype}"
        raise InputError(f"query, key and value must share one dtype of float32, bfloat16, float16; {dtypes}")
    if not query.device == key.device == value.device:
        raise InputError(f"query is on {query.device}, key on {key.device} and value on {value.device}")
    for name, size in (("window", window), ("chunk", chunk)):
        if size is not None and size < 1:
            raise InputError(f"{name} must be at least 1 position or None; got {size}")
    if softcap is not None and not softcap > 0:
        raise InputError(f"softcap must be a positive number or None; got {softcap}")
    if sinks is not None and (sinks.shape != query.shape[1:2] or sinks.device != query.device):
        found = f"got {tuple(sinks.shape)} on {sinks.device}"
        raise InputError(f"sinks must be [num_heads] = [{query.shape[1]}] on {query.device}; {found}")


def _unfit(
    query: Tensor,
    value: Tensor,
    layout: SegmentLayout,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    invariant: bool,
) -> dict[str, str]:
    """What these operands rule out, and why."""
    reasons = {}
    if max(query.shape[2], value.shape[2]) > _MAX_DIM:
        reasons["triton"] = f"its kernel takes heads of at most {_MAX_DIM} dimensions"
    if invariant:
        reasons["flash"] = "its kernels add in an order that depends on the batch"
    elif not layout.rows_are_keys:
        reasons["flash"] = "the last keys are not those of the rows, as in a pruned last layer"
    elif query.device.type == "cuda" and (reason := _flash_unfit(query, value, layout, window, chunk, softcap)):
        reasons["flash"] = reason
    return reasons


def _triton(*operands: Any, **options: Any) -> Tensor:
    from gatekern.ops.triton.prefix_attention import prefix_attention as launch

    return launch(*operands, **options)


def _flash(*operands: Any, **options: Any) -> Tensor:
    from gatekern.ops.flash.prefix_attention import prefix_attention as launch

    return launch(*operands, **options)


def _flash_unfit(*operands: Any) -> str | None:
    from gatekern.ops.flash.prefix_attention import unfit

    return unfit(*operands)


def prefix_attention_reference(
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
) -> Tensor:
    """`prefix_attention` by one dense mask, in float32 or, for float64 inputs, float64.

    Quadratic in memory: the oracle of the tests, and the definition.
    """
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.shape[1] // key.shape[1]
    k = key.to(work).repeat_interleave(groups, dim=1)
    v = value.to(work).repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.to(work), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = torch.from_numpy(visibility(layout, window, chunk)).to(query.device)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(work)[:, None, None].expand(-1, layout.num_rows, 1)], dim=2)
    weights = scores.softmax(dim=-1)[..., : layout.num_keys]
    return torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)


def visibility(layout: SegmentLayout, window: int | None = None, chunk: int | None = None) -> NDArray[np.bool_]:
    """The dense mask that `layout` stands for, bool [num_rows, num_keys]. For tests and small inputs."""
    return layout.sees(np.arange(layout.num_rows), np.arange(layout.num_keys), layout.first_visible(window, chunk))

# ruff: noqa: N803
# mypy: ignore-errors
"""One kernel, one pass over the path of a tile of rows (`gatekern.tiles`): shared keys without a mask, then its own.

A program owns the rows of one tile for one key-value head, packed with all query heads that read it (GQA), so every key
is loaded once for all of them. It walks the path in blocks of slots counted from the root, with the softmax online:
first the blocks that lie wholly in shared segments, where only a window can mask, then those with keys of the tile's
own segment. Nothing is split over keys and nothing is added atomically, and blocks lie where they lie in any batch, so
a row's bits do not depend on its batch mates.

Kernel parameters in capitals are constexpr, as everywhere in Triton; mypy cannot read its language.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gatekern.errors import BackendError
from gatekern.layout import SegmentLayout
from gatekern.ops.triton.configs import AttentionConfig, prefix_attention_config
from gatekern.ops.triton.math import finite_shift, tanh
from gatekern.tiles import tiles_of

LOG2_E = tl.constexpr(1.4426950408889634)


# What changes from call to call is not worth a compilation of its own.
@triton.jit(do_not_specialize=["num_keys"])
def prefix_attention_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    slot_keys: tl.tensor,
    key_table: tl.tensor,
    first_visible: tl.tensor,
    heads: tl.tensor,
    num_keys: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_REACH: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
) -> None:
    entry = table + tl.program_id(0) * 7
    row_begin, row_end = tl.load(entry), tl.load(entry + 1)
    prefix_at, prefix_len, own_at = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    slot_begin, slot_end = tl.load(entry + 5), tl.load(entry + 6)
    kv_head = tl.program_id(1).to(tl.int64)

    packed = tl.arange(0, BLOCK_ROWS)
    row = row_begin + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    in_tile = row < row_end
    d = tl.arange(0, BLOCK_DIM)
    e = tl.arange(0, BLOCK_VALUES)
    slot = tl.arange(0, BLOCK_SLOTS)

    at = row.to(tl.int64) * query_row_stride + head * query_head_stride
    q = tl.load(query + at[:, None] + d[None, :], mask=in_tile[:, None] & (d < DIM)[None, :], other=0.0)
    lowest = tl.zeros((BLOCK_ROWS,), dtype=tl.int32)
    if HAS_REACH:
        lowest = tl.load(first_visible + row, mask=in_tile, other=0)
    key_columns = key + kv_head * key_head_stride + d[:, None]
    value_columns = value + kv_head * value_head_stride + e[None, :]

    maximum = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    if HAS_SINKS:  # a key with zero value that every row sees
        maximum = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros((BLOCK_ROWS, BLOCK_VALUES), dtype=tl.float32)

    prefix_end = tl.maximum(slot_begin, tl.minimum(prefix_len, slot_end) // BLOCK_SLOTS * BLOCK_SLOTS)
    for begin in range(slot_begin, prefix_end, BLOCK_SLOTS):
        index = tl.load(slot_keys + prefix_at + begin + slot).to(tl.int64)
        k = _load(key_columns + index[None, :] * key_row_stride, (d < DIM)[:, None], DIM == BLOCK_DIM)
        v = _load(
            value_columns + index[:, None] * value_row_stride, (e < VALUE_DIM)[None, :], VALUE_DIM == BLOCK_VALUES
        )
        scores = _scores(q, k, scale, softcap, HAS_SOFTCAP, UPCAST)
        if HAS_REACH:  # the slots of shared segments are positions
            scores = tl.where((begin + slot)[None, :] >= lowest[:, None], scores, float("-inf"))
        maximum, total, acc = _update(scores, v, maximum, total, acc, UPCAST)

    for begin in range(prefix_end, slot_end, BLOCK_SLOTS):
        place = begin + slot
        inside = place < slot_end
        # Beyond the end the last key stands in: zero weights do not hide a NaN, so no foreign value may be read.
        place = tl.minimum(place, slot_end - 1)
        index = tl.load(slot_keys + tl.where(place < prefix_len, prefix_at, own_at) + place)
        seen_begin = tl.load(key_table + index)
        seen_end = tl.load(key_table + num_keys + index)
        visible = inside[None, :] & (seen_begin[None, :] <= row[:, None]) & (row[:, None] < seen_end[None, :])
        if HAS_REACH:
            position = tl.load(key_table + 2 * num_keys + index)
            visible = visible & (position[None, :] >= lowest[:, None])
        index = index.to(tl.int64)
        k = _load(key_columns + index[None, :] * key_row_stride, (d < DIM)[:, None], DIM == BLOCK_DIM)
        v = _load(
            value_columns + index[:, None] * value_row_stride, (e < VALUE_DIM)[None, :], VALUE_DIM == BLOCK_VALUES
        )
        scores = tl.where(visible, _scores(q, k, scale, softcap, HAS_SOFTCAP, UPCAST), float("-inf"))
        maximum, total, acc = _update(scores, v, maximum, total, acc, UPCAST)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row that sees nothing gets zeros
    at = (row.to(tl.int64) * heads + head) * VALUE_DIM
    tl.store(
        out + at[:, None] + e[None, :],
        acc.to(out.dtype.element_ty),
        mask=in_tile[:, None] & (e < VALUE_DIM)[None, :],
    )


@triton.jit
def _load(pointers, inside, ALL: tl.constexpr):
    """Keys or values; without a mask where the head dimension fills its block."""
    if ALL:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _scores(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr):
    """Scores of a block in units of log 2."""
    if UPCAST:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    return scores * LOG2_E


@triton.jit
def _update(scores, v, maximum, total, acc, UPCAST: tl.constexpr):
    """One step of the online softmax. A block without a visible key changes no bit."""
    higher = tl.maximum(maximum, tl.max(scores, axis=1))
    shift = finite_shift(higher)
    keep = tl.exp2(maximum - shift)
    weights = tl.exp2(scores - shift[:, None])
    total = total * keep + tl.sum(weights, axis=1)
    weights = weights.to(v.dtype)
    if UPCAST:
        weights = weights.to(tl.float32)
        v = v.to(tl.float32)
    acc = tl.dot(weights, v, acc * keep[:, None], input_precision="ieee")
    return higher, total, acc


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SegmentLayout,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Launch on operands that `gatekern.ops.prefix_attention` has checked."""
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    num_rows, heads, dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[2]
    interpreted = query.device.type == "cpu"
    capability = (0, 0) if interpreted else torch.cuda.get_device_capability(query.device)
    block_dim, block_value_dim = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    config = prefix_attention_config(query.element_size(), max(block_dim, block_value_dim), capability)
    plan = _plan(layout, heads // kv_heads, config, window, chunk, query.device)
    out = query.new_empty(num_rows, heads, value_dim)
    if num_rows == 0:
        return out
    prefix_attention_kernel[(plan.table.shape[0], kv_heads)](
        query,
        key,
        value,
        query if sinks is None else sinks.contiguous(),
        out,
        plan.table,
        plan.slot_keys,
        plan.key_table,
        plan.first_visible,
        heads,
        layout.num_keys,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        scale,
        softcap or 0.0,
        GROUP=heads // kv_heads,
        DIM=dim,
        VALUE_DIM=value_dim,
        HAS_REACH=window is not None or chunk is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        UPCAST=interpreted,  # the interpreter's dot multiplies the bit patterns of bf16
        BLOCK_ROWS=config.block_rows,
        BLOCK_SLOTS=config.block_slots,
        BLOCK_DIM=block_dim,
        BLOCK_VALUES=block_value_dim,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,  # contractions could differ between the two loops, and with them a row's bits
    )
    return out


class _Plan(NamedTuple):
    """`gatekern.tiles.Tiles` on the device."""

    table: Tensor  # int32 [num_tiles, 7]
    slot_keys: Tensor  # int32 [num_slots]
    key_table: Tensor  # int32 [3, num_keys]: rows that see each key, begin and end, and its position
    first_visible: Tensor  # int32 [num_rows]


def _plan(
    layout: SegmentLayout,
    group: int,
    config: AttentionConfig,
    window: int | None,
    chunk: int | None,
    device: torch.device,
) -> _Plan:
    """Computed and moved once per layout, for all layers with this window."""
    name = ("triton", group, config, window, chunk, device)
    plan = layout.derived.get(name)
    if plan is None:
        if group > config.block_rows:
            raise BackendError(f"{group} query heads a key-value head; the Triton kernel packs {config.block_rows}")
        tiles = tiles_of(layout, rows=config.block_rows // group, block=config.block_slots, window=window, chunk=chunk)
        key_table = np.stack([*layout.seen.T, layout.key_positions]).astype(np.int32)
        arrays = (tiles.table, tiles.keys, key_table, tiles.first_visible)
        plan = layout.derived[name] = _Plan(*(torch.from_numpy(array).to(device) for array in arrays))
    return plan

"""`prefix_attention` whose results do not depend on the batch: tiles of fixed shape over whole paths.

Every tile is one call over its rows' path in blocks of slots counted from the root (`gatekern.tiles`), so that a row
meets the same keys in the same blocks whatever else is in the stream. Keys of shared segments are read once for every
tile below them: the price of invariance with PyTorch's kernels, which offer no finer control.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gatekern.layout import SegmentLayout
from gatekern.ops.pytorch.dense_attention import attend, attends_by_flash, merge_
from gatekern.tiles import tiles_of

_ROWS = 32  # of every call: the flash kernel cuts rows into blocks of this size while there are few
_BLOCK = 512  # slots: the flash kernel takes as many keys at a time
_STEP = 64  # slots: the last block is cut to a multiple of this


def path_attention(
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
    """Operands and result as in `gatekern.ops.prefix_attention`."""
    out = query.new_empty(layout.num_rows, query.shape[1], value.shape[2])
    # The flash kernel itself takes fixed blocks. A plain sum over a row would depend on its length, so it gets blocks.
    in_one_call = attends_by_flash(query, value, softcap)
    for tile in _plan(layout, window, chunk, query.device):
        q, k, v = (x[index][None].transpose(1, 2) for x, index in zip((query, key, value), tile.indices, strict=True))
        bias = torch.zeros(q.shape[2], k.shape[2], dtype=query.dtype, device=query.device)
        bias.masked_fill_(_hidden(tile), -torch.inf)
        size = k.shape[2] if in_one_call else _BLOCK
        blocks = zip(k.split(size, dim=2), v.split(size, dim=2), bias[None, None].split(size, dim=3), strict=True)
        parts = (attend(q, *kv, scale=scale, softcap=softcap, causal=False, bias=mask) for *kv, mask in blocks)
        first, lse = next(parts)
        attended = first.float()
        for part in parts:
            merge_(attended, lse, *part)
        if sinks is not None:
            attended *= torch.sigmoid(lse - sinks.float()[:, None])[..., None]
        begin, end = tile.range
        out[begin:end] = attended[0, :, : end - begin].transpose(0, 1).to(out.dtype)
    return out


class _Tile(NamedTuple):
    """One call."""

    range: tuple[int, int]
    rows: Tensor  # int64 [_ROWS]: those of the range; padding repeats the last
    keys: Tensor  # int64 [slots]: from the tile's first slot on; padding repeats the last key
    seen: Tensor  # int64 [3, slots]: rows that see each key, begin and end (equal for padding), and its position
    lowest: Tensor  # int64 [_ROWS]: lowest position that each row may see

    @property
    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of query, key and value."""
        return self.rows, self.keys, self.keys


def _hidden(tile: _Tile) -> Tensor:
    """What is masked, bool [_ROWS, slots]."""
    begin, end, position = tile.seen
    row = tile.rows[:, None]
    hidden: Tensor = (row < begin) | (row >= end) | (position < tile.lowest[:, None])
    return hidden


def _plan(layout: SegmentLayout, window: int | None, chunk: int | None, device: torch.device) -> list[_Tile]:
    """Computed and moved once per layout, for all layers with this window."""
    name = ("path", window, chunk, device)
    plan: list[_Tile] | None = layout.derived.get(name)
    if plan is None:
        tiles = tiles_of(layout, rows=_ROWS, block=_BLOCK, window=window, chunk=chunk)
        plan = layout.derived[name] = []
        for row_begin, row_end, prefix_at, prefix_len, own_at, slot_begin, slot_end in tiles.table.tolist():
            slots = np.arange(slot_begin, -(-slot_end // _STEP) * _STEP)
            used = np.minimum(slots, slot_end - 1)
            keys = tiles.keys[np.where(used < prefix_len, prefix_at, own_at) + used].astype(np.int64)
            seen = np.stack([*layout.seen[keys].T, layout.key_positions[keys]])
            seen[:2, slots >= slot_end] = 0
            rows = np.minimum(np.arange(row_begin, row_begin + _ROWS), row_end - 1)
            arrays = (rows, keys, seen, tiles.first_visible[rows].astype(np.int64))
            plan.append(_Tile((row_begin, row_end), *(torch.from_numpy(array).to(device) for array in arrays)))
    return plan

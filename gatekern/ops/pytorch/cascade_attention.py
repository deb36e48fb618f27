"""`prefix_attention` as dense calls: own segments in batches, shared segments once for all the rows below them.

Partial results are merged by their log-sum-exp, as in Hydragen (arXiv 2402.05099) at any depth of sharing: keys of a
shared prefix are read once for all the rows that see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gatekern.layout import IntArray, Range, SegmentLayout
from gatekern.ops.pytorch.dense_attention import attend, merge_

_ROWS_PER_MASK = (
    256  # masked rows are taken in blocks: a mask is never larger than this many rows by the keys they span
)
_PADDING = 1.25  # short segments share a call while it computes at most this many times their own scores
_ALONE = 256  # a segment of this many keys fills a call by itself


def cascade_attention(
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
    """Operands and result as in `gatekern.ops.prefix_attention`; those of `query` in its dtype."""
    schedule = _schedule(layout, window, chunk, query.dtype, query.device)
    num_heads, value_dim = query.shape[1], value.shape[2]
    # One row more than there are: padding is written there.
    out = query.new_empty(layout.num_rows + 1, num_heads, value_dim, dtype=torch.float32)
    lse = query.new_empty(layout.num_rows + 1, num_heads, dtype=torch.float32)

    for batch in schedule.own:
        taken = _take_rows(query, batch.rows), _take_rows(key, batch.keys), _take_rows(value, batch.keys)
        heads = [_heads_first(x) for x in taken]
        part, part_lse = attend(*heads, scale=scale, softcap=softcap, causal=batch.bias is None, bias=batch.bias)
        out.index_copy_(0, batch.target, part.transpose(1, 2).flatten(0, 1).float())
        lse.index_copy_(0, batch.target, part_lse.transpose(1, 2).flatten(0, 1))
    out, lse = out[:-1], lse[:-1]

    for block in schedule.blocks:
        rows = slice(*block.rows)
        heads = [_heads_first(x[None]) for x in (query[rows], _take_ranges(key, block), _take_ranges(value, block))]
        part, part_lse = attend(*heads, scale=scale, softcap=softcap, causal=block.causal, bias=block.bias)
        part, part_lse = part[0].transpose(0, 1), part_lse[0].transpose(0, 1)
        if block.own:
            out[rows], lse[rows] = part.float(), part_lse
        else:
            if block.blind is not None:  # the flash kernel reports 0 for a row that sees no key
                part_lse = part_lse.masked_fill(block.blind[:, None], -torch.inf)
            merge_(out[rows], lse[rows], part, part_lse)

    if sinks is not None:
        out *= torch.sigmoid(lse - sinks.float())[..., None]
    return out.to(query.dtype)


@dataclass(frozen=True)
class _OwnBatch:
    """Segments that attend to their own keys in one call, padded on the right to the longest."""

    rows: Tensor  # int64 [batch, num_rows]: query rows; padding repeats a segment's last row
    keys: Tensor  # int64 [batch, num_keys]: on the key axis; padding repeats its last key
    target: Tensor  # int64 [batch * num_rows]: where each result goes; one past the last row for padding
    bias: Tensor | None  # [batch, 1, num_rows, num_keys], 0 where visible and -inf elsewhere; None: causal


@dataclass(frozen=True)
class _Block:
    """A range of rows over some ranges of keys, in one call."""

    rows: Range
    keys: list[Range]
    own: bool  # the rows' own segment: the first part that they see
    causal: bool = False
    bias: Tensor | None = None  # [1, 1, rows, keys], 0 where visible and -inf elsewhere
    blind: Tensor | None = None  # bool [rows]: rows that see none of these keys


@dataclass(frozen=True)
class _Schedule:
    own: tuple[_OwnBatch, ...]
    blocks: tuple[_Block, ...]  # own blocks before shared ones, so that a merge finds a finite log-sum-exp


def _schedule(
    layout: SegmentLayout, window: int | None, chunk: int | None, dtype: torch.dtype, device: torch.device
) -> _Schedule:
    """Calls to make for layers with this window or chunk, on this device; computed once per layout."""
    key = (window, chunk, dtype, device)
    schedule = layout.derived.get(key)
    if schedule is None:
        schedule = layout.derived[key] = _build_schedule(layout, layout.first_visible(window, chunk), dtype, device)
    return schedule


def _build_schedule(
    layout: SegmentLayout, first_visible: IntArray, dtype: torch.dtype, device: torch.device
) -> _Schedule:
    def bias(seen: NDArray[np.bool_]) -> Tensor:
        """From [batch, rows, keys] to what `_attend` adds to the scores of every head."""
        zeros = torch.zeros(seen.shape, dtype=dtype, device=device)
        return zeros.masked_fill_(~torch.from_numpy(seen).to(device), -torch.inf)[:, None]

    def masked(rows: Range, keys: list[Range], own: bool) -> Iterator[_Block]:
        """Blocks of rows over the keys from the first one that any of them sees."""
        for begin in range(*rows, _ROWS_PER_MASK):
            end = min(begin + _ROWS_PER_MASK, rows[1])
            index = np.concatenate([np.arange(*one) for one in keys])
            seen = layout.sees(np.arange(begin, end), index, first_visible)
            used = np.nonzero(seen.any(axis=0))[0]
            if not len(used):
                continue
            index, seen = index[used[0] : used[-1] + 1], seen[:, used[0] : used[-1] + 1]
            blind = None if own else torch.from_numpy(~seen.any(axis=1)).to(device)
            yield _Block((begin, end), _as_ranges(index), own, bias=bias(seen[None]), blind=blind)

    short: dict[bool, list[tuple[Range, list[Range]]]] = {True: [], False: []}  # by whether they are causal
    blocks: list[_Block] = []
    for rows, keys in layout.own():
        begin, end = keys[0]
        causal = (
            len(keys) == 1
            and np.array_equal(layout.seen[begin:end, 0], np.arange(*rows))  # key i is row i
            and bool((layout.seen[begin:end, 1] >= rows[1]).all())
            and first_visible[rows[1] - 1] <= layout.key_positions[begin]
        )
        if sum(stop - start for start, stop in keys) < _ALONE:
            short[causal].append((rows, keys))
        elif causal:
            blocks.append(_Block(rows, keys, own=True, causal=True))
        else:
            blocks.extend(masked(rows, keys, own=True))

    for rows, keys in layout.shared():
        first, last = layout.key_positions[keys[0][0]], layout.key_positions[keys[-1][1] - 1]
        if first_visible[slice(*rows)].max() <= first:
            blocks.append(_Block(rows, keys, own=False))
        elif first_visible[slice(*rows)].min() <= last:
            blocks.extend(masked(rows, keys, own=False))

    batches = []
    for causal, segments in short.items():
        for group in _similar(segments):
            rows_index, rows_valid = _padded([[rows] for rows, _ in group])
            keys_index, keys_valid = _padded([keys for _, keys in group])
            seen = None if causal else layout.sees(rows_index, keys_index, first_visible) & keys_valid[:, None, :]
            batches.append(
                _OwnBatch(
                    rows=torch.from_numpy(rows_index).to(device),
                    keys=torch.from_numpy(keys_index).to(device),
                    target=torch.from_numpy(np.where(rows_valid, rows_index, layout.num_rows).reshape(-1)).to(device),
                    bias=None if seen is None else bias(seen),
                )
            )
    return _Schedule(tuple(batches), tuple(blocks))


def _as_ranges(index: IntArray) -> list[Range]:
    """Ascending or piecewise ascending indices as ranges of consecutive ones."""
    cuts = np.nonzero(np.diff(index) != 1)[0] + 1
    pieces = np.split(index, cuts)
    return [(int(piece[0]), int(piece[-1]) + 1) for piece in pieces]


def _similar(segments: list[tuple[Range, list[Range]]]) -> Iterator[list[tuple[Range, list[Range]]]]:
    """Group segments by number of rows and keys, so that little padding is computed."""

    def size(segment: tuple[Range, list[Range]]) -> tuple[int, int]:
        (begin, end), keys = segment
        return end - begin, sum(stop - start for start, stop in keys)

    queue = sorted(segments, key=size, reverse=True)
    sizes = [size(segment) for segment in queue]
    begin = 0
    while begin < len(queue):
        end, rows, keys, work = begin, 0, 0, 0
        while end < len(queue):
            rows, keys, work = max(rows, sizes[end][0]), max(keys, sizes[end][1]), work + sizes[end][0] * sizes[end][1]
            if rows * keys * (end + 1 - begin) > _PADDING * work:
                break
            end += 1
        yield queue[begin:end]
        begin = end


def _padded(ranges: list[list[Range]]) -> tuple[IntArray, NDArray[np.bool_]]:
    """Indices in each list of ranges, padded on the right with the last one, and which are no padding."""
    flat = [np.concatenate([np.arange(*one) for one in some]) for some in ranges]
    lengths = np.array([len(index) for index in flat])
    place = np.arange(lengths.max())
    starts = np.cumsum(lengths) - lengths
    index = np.concatenate(flat)[starts[:, None] + np.minimum(place, lengths[:, None] - 1)]
    return index, place < lengths[:, None]


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]``, row by row in one copy: several times faster than indexing with a matrix."""
    return x.flatten(1).index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:])


def _take_ranges(x: Tensor, block: _Block) -> Tensor:
    """Keys or values of a block; a view when they are one range."""
    pieces = [x[begin:end] for begin, end in block.keys]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _heads_first(x: Tensor) -> Tensor:
    """[batch, rows, heads, dim] as [batch, heads, rows, dim], without a copy."""
    return x.transpose(1, 2)

"""Attention over a packed stream of segments that share prefixes.

The stream is a prefix tree in depth-first preorder (`gatekern.layout`). A row sees the segments above its own and what
precedes it in its own: so attention is one call over the segments themselves, batched, plus one unmasked call for every
segment that others share, whose rows are contiguous. The partial results are merged by their log-sum-exp, as in
Hydragen (arXiv 2402.05099) at any depth of sharing: keys of a shared prefix are read once for all the rows below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gatekern.layout import IntArray, Range, SegmentLayout

_ROWS_PER_MASK = (
    256  # masked rows are taken in blocks: a mask is never larger than this many rows by the keys they span
)
_PADDING = 1.25  # short segments share a call while it computes at most this many times their own scores
_ALONE = 256  # a segment of this many keys fills a call by itself
_SCORES_PER_BLOCK = 1 << 23  # elements of the score matrix that the plain path holds at once


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
    schedule = _schedule(layout, window, chunk, query.dtype, query.device)
    num_heads, value_dim = query.shape[1], value.shape[2]
    # One row more than there are: padding is written there.
    out = query.new_empty(layout.num_rows + 1, num_heads, value_dim, dtype=torch.float32)
    lse = query.new_empty(layout.num_rows + 1, num_heads, dtype=torch.float32)

    for batch in schedule.own:
        taken = _take_rows(query, batch.rows), _take_rows(key, batch.keys), _take_rows(value, batch.keys)
        heads = [_heads_first(x) for x in taken]
        part, part_lse = _attend(*heads, scale=scale, softcap=softcap, causal=batch.bias is None, bias=batch.bias)
        out.index_copy_(0, batch.target, part.transpose(1, 2).flatten(0, 1).float())
        lse.index_copy_(0, batch.target, part_lse.transpose(1, 2).flatten(0, 1))
    out, lse = out[:-1], lse[:-1]

    for block in schedule.blocks:
        rows = slice(*block.rows)
        heads = [_heads_first(x[None]) for x in (query[rows], _take_ranges(key, block), _take_ranges(value, block))]
        part, part_lse = _attend(*heads, scale=scale, softcap=softcap, causal=block.causal, bias=block.bias)
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


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over more keys into `out` and `lse`, in place.

    With ``w = sigmoid(part_lse - lse)`` the result is ``(1 - w) * out + w * part``, and its log-sum-exp
    ``logaddexp(lse, part_lse)``.

    Parameters
    ----------
    out : Tensor float32 [rows, heads, dim]
        Attention over the keys so far.
    lse : Tensor float32 [rows, heads]
        Its log-sum-exp of scores, nats; finite.
    part : Tensor [rows, heads, dim]
        Attention over other keys.
    part_lse : Tensor float32 [rows, heads]
        Its log-sum-exp, ``-inf`` where a row sees none of those keys.
    """
    out.lerp_(part.float(), torch.sigmoid(part_lse - lse)[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


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
    return _sees(layout, np.arange(layout.num_rows), np.arange(layout.num_keys), layout.first_visible(window, chunk))


def _sees(layout: SegmentLayout, rows: IntArray, keys: IntArray, first_visible: IntArray) -> NDArray[np.bool_]:
    """Whether each of `rows` [..., num_rows] sees each of `keys` [..., num_keys]: bool [..., num_rows, num_keys]."""
    rows, keys = rows[..., :, None], keys[..., None, :]
    begin, end = layout.seen[keys, 0], layout.seen[keys, 1]
    mask: NDArray[np.bool_] = (begin <= rows) & (rows < end) & (layout.key_positions[keys] >= first_visible[rows])
    return mask


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
            seen = _sees(layout, np.arange(begin, end), index, first_visible)
            used = np.nonzero(seen.any(axis=0))[0]
            if not len(used):
                continue
            index, seen = index[used[0] : used[-1] + 1], seen[:, used[0] : used[-1] + 1]
            blind = None if own else torch.from_numpy(~seen.any(axis=1)).to(device)
            yield _Block((begin, end), _as_ranges(index), own, bias=bias(seen[None]), blind=blind)

    short: dict[bool, list[tuple[Range, list[Range]]]] = {True: [], False: []}  # by whether they are causal
    blocks: list[_Block] = []
    first_row_key = layout.num_keys - layout.num_rows
    for rows, keys in layout.own():
        begin, end = (row + first_row_key for row in rows)
        causal = (
            keys == [(begin, end)]
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
            seen = None if causal else _sees(layout, rows_index, keys_index, first_visible) & keys_valid[:, None, :]
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


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float | None,
    causal: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One dense attention call: output [batch, heads, rows, value_dim] and float32 log-sum-exp [batch, heads, rows].

    `causal` means that key ``i`` is row ``i``. `bias` [batch, 1, rows, keys] is added to the scores.
    """
    if query.device.type == "cpu" and softcap is None and query.shape[-1] == value.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse
    return _attend_by_products(query, key, value, scale=scale, softcap=softcap, causal=causal, bias=bias)


def _attend_by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float | None,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, heads, num_rows, _ = query.shape
    kv_heads, num_keys = key.shape[1], key.shape[2]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    k, v = key.float()[:, :, None], value.float()[:, :, None]
    step = max(16, _SCORES_PER_BLOCK // (batch * heads * num_keys))
    outs, lses = [], []
    for row in range(0, num_rows, step):
        scores = grouped[..., row : row + step, :].float() @ k.transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[:, :, None, row : row + step].float()
        if causal:
            rows = torch.arange(row, row + scores.shape[-2], device=scores.device)
            scores = scores.masked_fill(rows[:, None] < torch.arange(num_keys, device=scores.device), -torch.inf)
        lse = scores.logsumexp(dim=-1)
        weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])  # a blind row keeps weights of zero
        outs.append((weights @ v).to(query.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=-2).flatten(1, 2), torch.cat(lses, dim=-1).flatten(1, 2)

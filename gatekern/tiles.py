"""A layout as tiles of rows, each with its keys slot by slot: the work list of an attention kernel. numpy only.

The *path* of a row is the keys of the segments above its own, in order of position, then the keys of its own segment.
Key ``i`` of the path is in *slot* ``i``. Where the tree cuts a prompt into segments depends on the other prompts of the
call; slots do not. A kernel that walks slots in fixed blocks, counted from slot 0, therefore adds in the same order
whatever else is in the batch: that, and tiles of one segment only, makes its results batch-invariant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gatekern.layout import IntArray, SegmentLayout, expand_ranges

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class Tiles:
    """Rows in tiles, and where to find the keys of each.

    Attributes
    ----------
    table : int32 [num_tiles, 7]
        ``row_begin, row_end, prefix_at, prefix_len, own_at, slot_begin, slot_end``: rows of one segment, and the slots
        that any of them may see, ``slot_begin`` rounded down to a block. Slot ``s`` holds key ``keys[prefix_at + s]``
        where ``s < prefix_len`` and ``keys[own_at + s]`` from there on. The longest come first, so that processors
        finish together.
    keys : int32 [num_slots]
        Indices on the key axis. Segments with the same path above them share its list.
    first_visible : int32 [num_rows]
        Lowest position that each row may see. Slots below ``prefix_len`` are positions.
    """

    table: Int32Array
    keys: Int32Array
    first_visible: Int32Array


def tiles_of(
    layout: SegmentLayout, *, rows: int, block: int, window: int | None = None, chunk: int | None = None
) -> Tiles:
    """Cut a layout into tiles.

    Parameters
    ----------
    layout : SegmentLayout
    rows : int
        Rows of a tile at most.
    block : int
        Slots that the kernel takes at a time.
    window, chunk : int, optional
        Of the layer, as in `gatekern.ops.prefix_attention`.

    Examples
    --------
    Two branches of two tokens below a prefix of three, in tiles of two rows:

    >>> from gatekern.planning import build_prefix_tree, pack
    >>> prompts = [np.array([1, 2, 3, 4, 5]), np.array([1, 2, 3, 6, 7])]
    >>> (forward,) = pack(build_prefix_tree(prompts, min_saved=1), 100)
    >>> tiles = tiles_of(forward.layout, rows=2, block=16)
    >>> tiles.table[:, :2].tolist()
    [[3, 5], [5, 7], [2, 3], [0, 2]]
    """
    prefix_of, prefixes = _prefixes(layout)
    prefix_lens = np.array([len(keys) for keys in prefixes], dtype=np.int64)
    prefix_starts = np.cumsum(prefix_lens) - prefix_lens
    own_keys = expand_ranges(layout.own_keys)
    own_key_counts = np.append(0, np.cumsum(np.diff(layout.own_keys)))[layout.own_key_offsets]

    counts = np.diff(layout.own_offsets)
    tiles_per_segment = -(-counts // rows)
    segment = np.repeat(np.arange(len(counts)), tiles_per_segment)
    place = np.arange(len(segment)) - np.repeat(np.cumsum(tiles_per_segment) - tiles_per_segment, tiles_per_segment)
    segment_end = layout.own_offsets[segment + 1]
    row_begin = layout.own_offsets[segment] + place * rows
    row_end = np.minimum(row_begin + rows, segment_end)

    prefix = prefix_of[segment]
    prefix_len = prefix_lens[prefix]
    own_at = int(prefix_lens.sum()) + own_key_counts[segment] - prefix_len
    first_visible = layout.first_visible(window, chunk)
    lowest = np.minimum.reduceat(first_visible, row_begin)  # tiles follow each other without a gap
    # A position is at most its slot, so slots below the lowest position are out of sight.
    slot_begin = lowest // block * block
    slot_end = prefix_len + _last_own_keys(layout, own_keys, own_key_counts, segment, row_end)

    table = np.stack([row_begin, row_end, prefix_starts[prefix], prefix_len, own_at, slot_begin, slot_end], axis=1)
    longest_first = np.argsort(slot_begin - slot_end, kind="stable")
    return Tiles(
        table=table[longest_first].astype(np.int32),
        keys=np.concatenate([*prefixes, own_keys]).astype(np.int32),
        first_visible=first_visible.astype(np.int32),
    )


def _last_own_keys(
    layout: SegmentLayout, own_keys: IntArray, own_key_counts: IntArray, segment: IntArray, row_end: IntArray
) -> IntArray:
    """For each tile, how many of its segment's own keys to visit: what follows them is seen by later rows only."""
    # From each own key on, the earliest row that sees one; ascending within a segment, and made so across segments.
    stride = layout.num_rows + 1
    counts = np.diff(own_key_counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    earliest = owner * stride + layout.seen[own_keys, 0]
    earliest = np.minimum.accumulate(earliest[::-1])[::-1]
    return np.searchsorted(earliest, segment * stride + row_end) - own_key_counts[segment]


def _prefixes(layout: SegmentLayout) -> tuple[IntArray, list[IntArray]]:
    """Which list of keys each segment has above it, and the distinct lists, in order of position."""
    shared = sorted(layout.shared(), key=lambda entry: (entry[0][0], -entry[0][1]))
    begins = layout.own_offsets[:-1].tolist()
    prefix_of = np.zeros(len(begins), dtype=np.int64)
    prefixes: list[IntArray] = []
    known: dict[tuple[int, ...], int] = {}
    open_: list[int] = []  # entries that cover the segment, outermost first: their row ranges are nested or disjoint
    following = 0
    for segment, row in enumerate(begins):
        while open_ and shared[open_[-1]][0][1] <= row:
            open_.pop()
        while following < len(shared) and shared[following][0][0] <= row:
            open_.append(following)
            following += 1
        name = tuple(open_)
        if name not in known:
            known[name] = len(prefixes)
            ranges = [keys for entry in open_ for keys in shared[entry][1]]
            keys = expand_ranges(np.array(ranges, dtype=np.int64).reshape(-1, 2))
            prefixes.append(keys[np.argsort(layout.key_positions[keys], kind="stable")])
        prefix_of[segment] = known[name]
    return prefix_of, prefixes

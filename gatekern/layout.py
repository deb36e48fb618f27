"""The attention pattern of one forward over a prefix tree, as ranges of rows and keys. Nothing here knows a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Range = tuple[int, int]  # begin, end

_PADDING_SEGMENT = 64  # rows of padding that kernels take together, at most


@dataclass(frozen=True)
class SegmentLayout:
    """Who sees whom in one forward. Rows index what is computed, keys the key axis.

    The key axis is ``[keys of earlier forwards | one key per row]``. Every key is seen by one range of rows, because
    rows are in depth-first order: `seen` is the whole attention pattern (up to a layer's window). The other fields
    say how to compute it: what a row sees is its segment's own keys, filtered by `seen`, and some shared ranges of
    keys, unfiltered.

    Attributes
    ----------
    seen : int64 [num_keys, 2]
        Rows ``begin..end`` that see each key.
    key_positions : int64 [num_keys]
        Position of every key in its prompt.
    row_positions : int64 [num_rows]
        Position of every row in its prompt.
    own_offsets : int64 [num_segments + 1]
        CSR offsets of the segments over the rows.
    own_key_offsets : int64 [num_segments + 1]
        CSR offsets into `own_keys`: the key ranges of each segment.
    own_keys : int64 [num_own_ranges, 2]
        Ranges ``begin..end`` of the key axis. In a prefill a segment's keys are its rows.
    shared_rows : int64 [num_shared, 2]
        Rows ``begin..end`` that all see the same earlier keys. A row may be in several ranges.
    shared_key_offsets : int64 [num_shared + 1]
        CSR offsets into `shared_keys`: the key ranges that each range of rows sees.
    shared_keys : int64 [num_key_ranges, 2]
        Ranges ``begin..end`` of the key axis, those of one entry in order of position.
    derived : dict
        For operators, to keep what they compute from the layout once and use in every layer.
    """

    seen: IntArray
    key_positions: IntArray
    row_positions: IntArray
    own_offsets: IntArray
    own_key_offsets: IntArray
    own_keys: IntArray
    shared_rows: IntArray
    shared_key_offsets: IntArray
    shared_keys: IntArray
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return int(self.own_offsets[-1])

    @property
    def num_keys(self) -> int:
        return len(self.key_positions)

    @property
    def rows_are_keys(self) -> bool:
        """Whether the last keys are those of the rows themselves: not so in a layout of some rows (`of_rows`)."""
        firsts = self.seen[max(0, self.num_keys - self.num_rows) :, 0]
        return np.array_equal(firsts, np.arange(self.num_rows))

    def own(self) -> Iterator[tuple[Range, list[Range]]]:
        """Row range of each segment with its key ranges."""
        for at, (begin, end) in enumerate(pairwise(self.own_offsets.tolist())):
            yield (begin, end), _ranges(self.own_keys, self.own_key_offsets, at)

    def shared(self) -> Iterator[tuple[Range, list[Range]]]:
        """Row ranges with the key ranges that they see."""
        for at, (begin, end) in enumerate(self.shared_rows.tolist()):
            yield (begin, end), _ranges(self.shared_keys, self.shared_key_offsets, at)

    def first_visible(self, window: int | None, chunk: int | None) -> IntArray:
        """Lowest position that each row may see under a sliding window or chunked attention, int64 [num_rows]."""
        rows = self.row_positions
        first = np.zeros_like(rows)
        if window is not None:
            first = np.maximum(first, rows - window + 1)
        if chunk is not None:
            first = np.maximum(first, rows // chunk * chunk)
        return first

    def sees(self, rows: IntArray, keys: IntArray, first_visible: IntArray) -> NDArray[np.bool_]:
        """Whether each of `rows` [..., r] sees each of `keys` [..., k]: bool [..., r, k]."""
        rows, keys = rows[..., :, None], keys[..., None, :]
        begin, end = self.seen[keys, 0], self.seen[keys, 1]
        mask: NDArray[np.bool_] = (begin <= rows) & (rows < end) & (self.key_positions[keys] >= first_visible[rows])
        return mask

    def of_rows(self, rows: IntArray) -> SegmentLayout:
        """The layout of some of the rows, over the same keys.

        Parameters
        ----------
        rows : int64 [num_new]
            Rows of this layout, ascending; may be repeated.
        """

        def new_rows(before: IntArray) -> IntArray:
            # New row j is rows[j], so those that were in begin..end are one range again.
            return np.searchsorted(rows, before)

        own_offsets = new_rows(self.own_offsets)
        alive = np.nonzero(np.diff(own_offsets))[0].tolist()
        return layout_of(
            seen=new_rows(self.seen),
            key_positions=self.key_positions,
            row_positions=self.row_positions[rows],
            own_offsets=np.append(own_offsets[alive], len(rows)),
            own=[_ranges(self.own_keys, self.own_key_offsets, at) for at in alive],
            shared=[
                ((begin, end), _ranges(self.shared_keys, self.shared_key_offsets, at))
                for at, (begin, end) in enumerate(new_rows(self.shared_rows).tolist())
                if begin < end
            ],
        )

    def extended(self, parents: IntArray) -> SegmentLayout:
        """The layout of one more token below some rows: a step of a decode.

        Parameters
        ----------
        parents : int64 [num_new]
            Row of this layout that each new row continues, ascending; repeated where a row branches.

        Returns
        -------
        SegmentLayout
            Of `num_new` rows, over the keys of this layout and theirs. A new row sees what its parent sees, and itself.
        """
        above = self.of_rows(parents)
        itself = np.arange(len(parents))[:, None] + [0, 1]
        positions = above.row_positions + 1
        return layout_of(
            seen=np.concatenate([above.seen, itself]),
            key_positions=np.concatenate([self.key_positions, positions]),
            row_positions=positions,
            own_offsets=above.own_offsets,
            own=[[*keys, (begin + self.num_keys, end + self.num_keys)] for (begin, end), keys in above.own()],
            shared=list(above.shared()),
        )

    def padded(self, num_rows: int) -> SegmentLayout:
        """The layout with rows at its end that see only themselves, `num_rows` in all.

        Those rows have position 0 and keys at the end of the key axis.
        """
        begins = np.arange(self.num_rows, num_rows, _PADDING_SEGMENT)
        ends = np.minimum(begins + _PADDING_SEGMENT, num_rows)
        keys = np.stack([begins, ends], axis=1) + (self.num_keys - self.num_rows)  # one more key for each of these rows
        rows = np.arange(self.num_rows, num_rows)
        return replace(
            self,
            seen=np.concatenate([self.seen, rows[:, None] + [0, 1]]),
            key_positions=np.append(self.key_positions, np.zeros_like(rows)),
            row_positions=np.append(self.row_positions, np.zeros_like(rows)),
            own_offsets=np.append(self.own_offsets, ends),
            own_key_offsets=np.append(self.own_key_offsets, len(self.own_keys) + 1 + np.arange(len(ends))),
            own_keys=np.concatenate([self.own_keys, keys]),
            derived={},
        )


def layout_of(
    *,
    seen: IntArray,
    key_positions: IntArray,
    row_positions: IntArray | None = None,
    own_offsets: IntArray,
    own: Sequence[Sequence[Range]],
    shared: Sequence[tuple[Range, list[Range]]],
) -> SegmentLayout:
    """A layout from lists of ranges. Without `row_positions` the last keys are those of the rows."""
    if row_positions is None:
        row_positions = key_positions[len(key_positions) - int(own_offsets[-1]) :]
    return SegmentLayout(
        seen=seen,
        key_positions=key_positions,
        row_positions=row_positions,
        own_offsets=own_offsets,
        own_key_offsets=np.cumsum([0, *map(len, own)], dtype=np.int64),
        own_keys=np.array([keys for ranges in own for keys in ranges], dtype=np.int64).reshape(-1, 2),
        shared_rows=np.array([rows for rows, _ in shared], dtype=np.int64).reshape(-1, 2),
        shared_key_offsets=np.cumsum([0, *(len(keys) for _, keys in shared)], dtype=np.int64),
        shared_keys=np.array([key for _, keys in shared for key in keys], dtype=np.int64).reshape(-1, 2),
    )


def expand_ranges(ranges: IntArray) -> IntArray:
    """The indices in ranges ``[begin, end)``, one range after the other: int64 [num_ranges, 2] to int64 [total].

    Examples
    --------
    >>> expand_ranges(np.array([[3, 5], [0, 2]])).tolist()
    [3, 4, 0, 1]
    """
    lengths = ranges[:, 1] - ranges[:, 0]
    starts = np.cumsum(lengths) - lengths
    indices: IntArray = np.arange(int(lengths.sum())) + np.repeat(ranges[:, 0] - starts, lengths)
    return indices


def _ranges(values: IntArray, offsets: IntArray, at: int) -> list[Range]:
    return [(begin, end) for begin, end in values[offsets[at] : offsets[at + 1]].tolist()]

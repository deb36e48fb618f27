"""From token ids to packed forwards: which tokens are computed once, and who sees them.

Prompts that start with the same tokens share them. The prompts of one call form a radix tree whose edges are
*segments* (runs of tokens); stored in depth-first preorder, the tree is at the same time

* the packed stream that the model reads (`PrefixTree.tokens`, every segment contiguous),
* the attention pattern: a token sees the segments on its path from the root, and its own segment causally, and the
  rows that see segment ``s`` are one contiguous range, because the descendants of ``s`` follow it in preorder,
* the schedule: a forward is a contiguous run of segments, and the only keys and values that must outlive it are those
  of the ancestors of the next run's first segment.

Nothing here knows a model, a tokenizer or torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Range = tuple[int, int]  # begin, end

#: A shared segment is worth its own attention call from this many saved tokens on. One call costs a few tens of
#: microseconds a layer, one token of the smallest useful backbone (135M parameters) about as much.
MIN_SAVED_TOKENS = 8


@dataclass(frozen=True)
class PrefixTree:
    """Radix tree over the prompts of one call, in depth-first preorder.

    Attributes
    ----------
    tokens : int64 [num_tokens]
        Token ids of all segments, one after the other: the packed stream.
    offsets : int64 [num_segments + 1]
        CSR offsets: segment ``s`` is ``tokens[offsets[s]:offsets[s + 1]]``. No segment is empty.
    parent : int64 [num_segments]
        Parent segment, -1 for a root.
    start : int64 [num_segments]
        Position (0-based, in the prompt) of the segment's first token.
    subtree_end : int64 [num_segments]
        One past the last descendant: the descendants of ``s`` are segments ``s + 1 .. subtree_end[s] - 1``.
    rows : int64 [num_prompts]
        Index into `tokens` of each prompt's last token: the answer position. Equal prompts have equal rows.
    """

    tokens: IntArray
    offsets: IntArray
    parent: IntArray
    start: IntArray
    subtree_end: IntArray
    rows: IntArray

    @property
    def num_segments(self) -> int:
        return len(self.parent)

    @property
    def positions(self) -> IntArray:
        """Position of every token in its prompt, int64 [num_tokens]."""
        lengths = np.diff(self.offsets)
        return np.arange(len(self.tokens)) + np.repeat(self.start - self.offsets[:-1], lengths)

    def ancestors(self, segment: int) -> list[int]:
        """Segments on the path from the root to `segment`, root first, `segment` excluded."""
        path: list[int] = []
        segment = int(self.parent[segment])
        while segment >= 0:
            path.append(segment)
            segment = int(self.parent[segment])
        return path[::-1]


def build_prefix_tree(
    prompts: Sequence[IntArray],
    *,
    max_segment: int | None = None,
    min_saved: int = MIN_SAVED_TOKENS,
) -> PrefixTree:
    """Find what the prompts share and lay it out.

    Parameters
    ----------
    prompts : sequence of int [length_i]
        Token ids of each fully rendered prompt. Any order, duplicates allowed, none empty.
    max_segment : int, optional
        Longer segments are cut into chains of at most this many tokens, so that every forward can keep its budget.
    min_saved : int
        Prefixes whose sharing saves fewer tokens than this are computed once per prompt instead.

    Returns
    -------
    PrefixTree
        Depends on the set of prompts only, not on their order.

    Notes
    -----
    Sorting brings prompts with a common prefix together, so the longest common prefixes of neighbours are enough to
    find every branch point.

    Examples
    --------
    >>> tree = build_prefix_tree([np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])], min_saved=1)
    >>> tree.tokens.tolist(), tree.offsets.tolist(), tree.parent.tolist()
    ([1, 2, 3, 4, 5], [0, 3, 4, 5], [-1, 0, 0])
    """
    unique, inverse = _sort_unique(prompts)
    shared = [_common_prefix(a, b) for a, b in pairwise(unique)]

    parent: list[int] = []
    start: list[int] = []
    pieces: list[IntArray] = []
    last_row = np.zeros(len(unique), dtype=np.int64)
    num_tokens = 0

    def add(prompt: IntArray, first: int, end: int, above: int) -> int:
        """Append tokens ``prompt[first:end]`` below segment `above`; returns the last segment of the chain."""
        nonlocal num_tokens
        step = max_segment or end - first
        for at in range(first, end, step):
            piece = prompt[at : min(at + step, end)]
            parent.append(above)
            start.append(at)
            pieces.append(piece)
            num_tokens += len(piece)
            above = len(parent) - 1
        return above

    # Each work item is a run of sorted prompts that agree on their first `depth` tokens, which are already laid out.
    work = [(lo, hi, 0, -1) for lo, hi in reversed(_split(shared, 0, len(unique), 0))]
    while work:
        lo, hi, depth, above = work.pop()
        first = unique[lo]
        if hi - lo == 1:
            add(first, depth, len(first), above)
            last_row[lo] = num_tokens - 1
            continue
        common = min(shared[lo : hi - 1])
        ends_here = len(first) == common  # the shortest prompt sorts first and may be a prefix of the others
        branches = _split(shared, lo + ends_here, hi, common)
        if (common - depth) * (len(branches) + ends_here - 1) >= min_saved:
            above = add(first, depth, common, above)
            if ends_here:
                last_row[lo] = num_tokens - 1
            depth = common
        elif ends_here:
            branches.insert(0, (lo, lo + 1))
        work.extend((a, b, depth, above) for a, b in reversed(branches))

    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    return PrefixTree(
        tokens=np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, dtype=np.int64),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        parent=np.array(parent, dtype=np.int64),
        start=np.array(start, dtype=np.int64),
        subtree_end=_subtree_ends(parent),
        rows=last_row[inverse],
    )


@dataclass(frozen=True)
class SegmentLayout:
    """Who sees whom in one packed forward. Rows index the stream, keys the key axis.

    The key axis is ``[borrowed segments | this stream]``: keys of earlier forwards first, then one key per row.

    Attributes
    ----------
    own_offsets : int64 [num_segments + 1]
        CSR offsets of the segments over the rows; each segment is causal in itself.
    shared_rows : int64 [num_shared, 2]
        Rows ``begin..end`` that all see the same earlier keys. A row may be in several ranges.
    shared_key_offsets : int64 [num_shared + 1]
        CSR offsets into `shared_keys`: the key ranges that each range of rows sees.
    shared_keys : int64 [num_key_ranges, 2]
        Ranges ``begin..end`` of the key axis, those of one entry in order of position.
    key_positions : int64 [num_keys]
        Position of every key in its prompt. The last `num_rows` keys are the rows themselves.
    derived : dict
        For operators, to keep what they compute from the layout once and use in every layer.
    """

    own_offsets: IntArray
    shared_rows: IntArray
    shared_key_offsets: IntArray
    shared_keys: IntArray
    key_positions: IntArray
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return int(self.own_offsets[-1])

    @property
    def num_keys(self) -> int:
        return len(self.key_positions)

    @property
    def row_positions(self) -> IntArray:
        """Position of every row in its prompt, int64 [num_rows]."""
        return self.key_positions[self.num_keys - self.num_rows :]

    def shared(self) -> Iterator[tuple[Range, list[Range]]]:
        """Row ranges with the key ranges that they see."""
        for at, (begin, end) in enumerate(self.shared_rows.tolist()):
            key_ranges = self.shared_keys[self.shared_key_offsets[at] : self.shared_key_offsets[at + 1]]
            yield (begin, end), [(k_begin, k_end) for k_begin, k_end in key_ranges.tolist()]

    def first_visible(self, window: int | None, chunk: int | None) -> IntArray:
        """Lowest position that each row may see under a sliding window or chunked attention, int64 [num_rows]."""
        rows = self.row_positions
        first = np.zeros_like(rows)
        if window is not None:
            first = np.maximum(first, rows - window + 1)
        if chunk is not None:
            first = np.maximum(first, rows // chunk * chunk)
        return first


@dataclass(frozen=True)
class PackedForward:
    """One forward: a contiguous run of segments, with the keys and values it borrows and leaves behind.

    Attributes
    ----------
    tokens : int64 [num_rows]
        What the model reads.
    layout : SegmentLayout
        Who sees whom.
    borrowed : tuple of int
        Segments of earlier forwards whose keys and values this one reads, root first: the start of the key axis.
    kept : tuple of (int, int, int)
        ``(segment, k_begin, k_end)``: what the next forward borrows, as ranges of this forward's key axis.
    read_prompts : int64 [num_read]
        Prompts whose last token is in this stream.
    read_rows : int64 [num_read]
        Row of that last token.
    """

    tokens: IntArray
    layout: SegmentLayout
    borrowed: tuple[int, ...]
    kept: tuple[tuple[int, int, int], ...]
    read_prompts: IntArray
    read_rows: IntArray


def pack(tree: PrefixTree, max_tokens: int) -> Iterator[PackedForward]:
    """Cut the tree into forwards of at most `max_tokens` tokens.

    Parameters
    ----------
    tree : PrefixTree
        Built with ``max_segment <= max_tokens``; a longer segment would exceed the budget.
    max_tokens : int
        Budget of tokens computed by one forward.

    Yields
    ------
    PackedForward
        In order; each may borrow from the one before it only.
    """
    positions = tree.positions
    by_row = np.argsort(tree.rows, kind="stable")
    sorted_rows = tree.rows[by_row]
    begin = 0
    while begin < tree.num_segments:
        room = tree.offsets[begin] + max_tokens
        end = max(int(np.searchsorted(tree.offsets, room, side="right")) - 1, begin + 1)
        borrowed = tree.ancestors(begin)
        first, last = int(tree.offsets[begin]), int(tree.offsets[end])

        lengths = np.diff(tree.offsets)
        num_borrowed = int(lengths[borrowed].sum())
        key_begin = dict(zip(borrowed, (np.cumsum(lengths[borrowed]) - lengths[borrowed]).tolist(), strict=True))
        key_begin |= {s: num_borrowed + int(tree.offsets[s]) - first for s in range(begin, end)}
        key_range = {s: (at, at + int(lengths[s])) for s, at in key_begin.items()}
        rows_below = {
            s: (
                max(int(tree.offsets[s + 1]), first) - first,
                min(int(tree.offsets[tree.subtree_end[s]]), last) - first,
            )
            for s in key_range
        }
        shared = _shared_ranges(tree.parent, key_range, rows_below)
        kept = tree.ancestors(end) if end < tree.num_segments else []
        lo, hi = np.searchsorted(sorted_rows, [first, last])
        borrowed_positions = [tree.start[s] + np.arange(lengths[s]) for s in borrowed]
        yield PackedForward(
            tokens=tree.tokens[first:last],
            layout=SegmentLayout(
                own_offsets=tree.offsets[begin : end + 1] - first,
                shared_rows=np.array([rows for rows, _ in shared], dtype=np.int64).reshape(-1, 2),
                shared_key_offsets=np.cumsum([0, *(len(keys) for _, keys in shared)], dtype=np.int64),
                shared_keys=np.array([key for _, keys in shared for key in keys], dtype=np.int64).reshape(-1, 2),
                key_positions=np.concatenate([*borrowed_positions, positions[first:last]]).astype(np.int64),
            ),
            borrowed=tuple(borrowed),
            kept=tuple((segment, *key_range[segment]) for segment in kept),
            read_prompts=by_row[lo:hi],
            read_rows=sorted_rows[lo:hi] - first,
        )
        begin = end


def _shared_ranges(
    parent: IntArray, key_range: dict[int, Range], rows_below: dict[int, Range]
) -> list[tuple[Range, list[Range]]]:
    """Row ranges with the key ranges that they see, one attention call each.

    The rows below a segment see its keys: one call. Below a nested segment they would see those of both in two calls,
    whose results have to be merged for every row. So a nested segment takes its parent's keys into its own call where
    that is cheaper: when the keys lie next to each other, or are fewer than the rows below.
    """
    keys: dict[int, list[Range]] = {}
    taken: dict[int, list[Range]] = {}  # rows that see a segment's keys through a nested segment's call
    for segment, own in key_range.items():  # parents come before their children
        keys[segment] = [own]
        above = keys.get(int(parent[segment]))
        begin, end = rows_below[segment]
        if above is None or begin >= end:
            continue
        if above[-1][1] == own[0]:
            keys[segment] = [*above[:-1], (above[-1][0], own[1])]
        elif sum(stop - start for start, stop in above) <= end - begin:
            keys[segment] = [*above, own]
        else:
            continue
        taken.setdefault(int(parent[segment]), []).append((begin, end))

    shared = []
    for segment in key_range:
        begin, end = rows_below[segment]
        for taken_begin, taken_end in [*taken.get(segment, []), (end, end)]:
            if begin < taken_begin:
                shared.append(((begin, taken_begin), keys[segment]))
            begin = max(begin, taken_end)
    return shared


def _sort_unique(prompts: Sequence[IntArray]) -> tuple[list[IntArray], IntArray]:
    """Distinct prompts in lexicographic order of their ids, and the index of each prompt among them."""
    # Big-endian bytes compare like the ids they encode, and bytes compare in C.
    keys = [np.asarray(prompt).astype(">u4").tobytes() for prompt in prompts]
    order = {key: at for at, key in enumerate(sorted(set(keys)))}
    unique: list[IntArray] = [np.zeros(0, dtype=np.int64)] * len(order)
    for key, prompt in zip(keys, prompts, strict=True):
        unique[order[key]] = prompt
    return unique, np.array([order[key] for key in keys], dtype=np.int64)


def _common_prefix(a: IntArray, b: IntArray) -> int:
    length = min(len(a), len(b))
    differs = np.nonzero(a[:length] != b[:length])[0]
    return int(differs[0]) if len(differs) else length


def _split(shared: Sequence[int], lo: int, hi: int, depth: int) -> list[tuple[int, int]]:
    """Cut sorted prompts ``lo..hi`` into runs that agree on more than `depth` tokens."""
    cuts = [at + 1 for at in range(lo, hi - 1) if shared[at] <= depth]
    edges = [lo, *cuts, hi]
    return [(a, b) for a, b in pairwise(edges) if a < b]


def _subtree_ends(parent: Sequence[int]) -> IntArray:
    ends = np.arange(1, len(parent) + 1, dtype=np.int64)
    for segment in range(len(parent) - 1, -1, -1):
        if parent[segment] >= 0:
            ends[parent[segment]] = max(ends[parent[segment]], ends[segment])
    return ends

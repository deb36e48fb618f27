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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

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
    shared = [_common_prefix(a, b) for a, b in zip(unique, unique[1:], strict=False)]

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
class PackedForward:
    """One forward: a contiguous run of segments, with the keys and values it borrows and leaves behind.

    Row and key indices are local. The key axis is ``[borrowed segments | this stream]``: first the tokens of
    `borrowed` in order, then the tokens of this forward.

    Attributes
    ----------
    tokens, positions : int64 [num_tokens]
        What the model reads.
    key_positions : int64 [num_keys]
        Positions along the key axis; the last ``num_tokens`` are `positions`.
    own_offsets : int64 [num_segments + 1]
        CSR offsets of the segments in the stream; each is causal in itself.
    shared : int64 [num_shared, 4]
        Rows ``(q_begin, q_end, k_begin, k_end)``: stream rows ``q_begin..q_end`` all see keys ``k_begin..k_end``.
    borrowed : tuple of int
        Segments of earlier forwards whose keys and values this one reads, root first.
    kept : tuple of (int, int, int)
        ``(segment, k_begin, k_end)``: what the next forward borrows, as ranges of this forward's key axis.
    read_prompts : int64 [num_read]
        Prompts whose last token is in this stream.
    read_rows : int64 [num_read]
        Stream row of that last token.
    """

    tokens: IntArray
    positions: IntArray
    key_positions: IntArray
    own_offsets: IntArray
    shared: IntArray
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

        key_begin: dict[int, int] = {}
        cursor = 0
        for segment in borrowed:
            key_begin[segment] = cursor
            cursor += int(tree.offsets[segment + 1] - tree.offsets[segment])
        for segment in range(begin, end):
            key_begin[segment] = cursor + int(tree.offsets[segment]) - first

        def key_range(segment: int, key_begin: dict[int, int] = key_begin) -> tuple[int, int]:
            length = int(tree.offsets[segment + 1] - tree.offsets[segment])
            return key_begin[segment], key_begin[segment] + length

        shared = []
        for segment in (*borrowed, *range(begin, end)):
            q_begin = max(int(tree.offsets[segment + 1]), first) - first
            q_end = min(int(tree.offsets[tree.subtree_end[segment]]), last) - first
            if q_begin < q_end:
                shared.append((q_begin, q_end, *key_range(segment)))

        kept = tree.ancestors(end) if end < tree.num_segments else []
        lo, hi = np.searchsorted(sorted_rows, [first, last])
        borrowed_positions = [
            tree.start[s] + np.arange(tree.offsets[s + 1] - tree.offsets[s]) for s in borrowed
        ]
        yield PackedForward(
            tokens=tree.tokens[first:last],
            positions=positions[first:last],
            key_positions=np.concatenate([*borrowed_positions, positions[first:last]]).astype(np.int64),
            own_offsets=tree.offsets[begin : end + 1] - first,
            shared=np.array(shared, dtype=np.int64).reshape(-1, 4),
            borrowed=tuple(borrowed),
            kept=tuple((segment, *key_range(segment)) for segment in kept),
            read_prompts=by_row[lo:hi],
            read_rows=sorted_rows[lo:hi] - first,
        )
        begin = end


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
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if a < b]


def _subtree_ends(parent: Sequence[int]) -> IntArray:
    ends = np.arange(1, len(parent) + 1, dtype=np.int64)
    for segment in range(len(parent) - 1, -1, -1):
        if parent[segment] >= 0:
            ends[parent[segment]] = max(ends[parent[segment]], ends[segment])
    return ends

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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gatekern.layout import IntArray, Range, SegmentLayout, layout_of

#: A shared segment is worth its own attention call from this many saved tokens on. One call costs a few tens of
#: microseconds a layer, one token of the smallest useful backbone (135M parameters) about as much.
MIN_SAVED_TOKENS = 8


@dataclass(frozen=True)
class TokenTrie:
    """Continuations that are read below every prompt, token by token.

    Attributes
    ----------
    tokens : int64 [num_nodes]
        Depth-first preorder.
    parent : int64 [num_nodes]
        Parent node, -1 for the prompt itself.
    """

    tokens: IntArray
    parent: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> IntArray:
        """Tokens from the prompt to each node, int64 [num_nodes]; 1 for the first level."""
        depths = np.ones(len(self), dtype=np.int64)
        for node, above in enumerate(self.parent.tolist()):
            if above >= 0:
                depths[node] = depths[above] + 1
        return depths

    def paths(self) -> list[IntArray]:
        """Tokens from the prompt to each place that is read: none for the prompt itself, then to each node."""
        paths = [np.zeros(0, dtype=np.int64)]
        for token, above in zip(self.tokens, self.parent.tolist(), strict=True):
            paths.append(np.append(paths[above + 1], token))
        return paths


def build_trie(sequences: Iterable[Sequence[int]]) -> TokenTrie:
    """The trie of all prefixes of `sequences` (none empty).

    Examples
    --------
    >>> trie = build_trie([(4, 5), (4, 6)])
    >>> trie.tokens.tolist(), trie.parent.tolist()
    ([4, 5, 6], [-1, 0, 0])
    """
    paths = sorted({tuple(path[: at + 1]) for path in sequences for at in range(len(path))})
    place = {(): -1} | {path: at for at, path in enumerate(paths)}
    return TokenTrie(
        tokens=np.array([path[-1] for path in paths], dtype=np.int64),
        parent=np.array([place[path[:-1]] for path in paths], dtype=np.int64),
    )


NO_TRIE = build_trie([])


@dataclass(frozen=True)
class PrefixTree:
    """Radix tree over the prompts of one call, in depth-first preorder.

    Attributes
    ----------
    tokens : int64 [num_tokens]
        Token ids of all segments, one after the other: the packed stream.
    positions : int64 [num_tokens]
        Position (0-based) of every token in its prompt.
    row_ends : int64 [num_tokens]
        Token ``i`` is seen by the tokens ``i .. row_ends[i] - 1`` and by no other: itself and what follows it.
    offsets : int64 [num_segments + 1]
        CSR offsets: segment ``s`` is ``tokens[offsets[s]:offsets[s + 1]]``. No segment is empty.
    parent : int64 [num_segments]
        Parent segment, -1 for a root.
    subtree_end : int64 [num_segments]
        One past the last descendant: the descendants of ``s`` are segments ``s + 1 .. subtree_end[s] - 1``.
    rows : int64 [num_prompts, 1 + num_nodes]
        Indices into `tokens`: each prompt's last token (the answer position), then the nodes of its trie. Equal
        prompts have equal rows.
    """

    tokens: IntArray
    positions: IntArray
    row_ends: IntArray
    offsets: IntArray
    parent: IntArray
    subtree_end: IntArray
    rows: IntArray

    @property
    def num_segments(self) -> int:
        return len(self.parent)

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
    trie: TokenTrie = NO_TRIE,
    max_segment: int | None = None,
    min_saved: int = MIN_SAVED_TOKENS,
) -> PrefixTree:
    """Find what the prompts share and lay it out.

    Parameters
    ----------
    prompts : sequence of int [length_i]
        Token ids of each fully rendered prompt. Any order, duplicates allowed, none empty.
    trie : TokenTrie
        Appended below every prompt, as the tail of its last segment.
    max_segment : int, optional
        Longer segments are cut into chains of at most this many tokens, so that every forward can keep its budget. At
        least the size of the trie, which is never cut.
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
    rows = np.zeros((len(unique), 1 + len(trie)), dtype=np.int64)
    num_tokens = 0

    def append(piece: IntArray, at: int, above: int) -> int:
        nonlocal num_tokens
        parent.append(above)
        start.append(at)
        pieces.append(piece)
        num_tokens += len(piece)
        return len(parent) - 1

    def add(prompt: IntArray, first: int, end: int, above: int) -> int:
        """Append tokens ``prompt[first:end]`` below segment `above`; returns the last segment of the chain."""
        step = max_segment or end - first
        for at in range(first, end, step):
            above = append(prompt[at : min(at + step, end)], at, above)
        return above

    def finish(at: int, segment: int, *, leaf: bool) -> None:
        """Prompt `at` ends where the stream ends now: note its row, and append its trie."""
        nonlocal num_tokens
        rows[at, 0] = num_tokens - 1
        if len(trie):
            rows[at, 1:] = num_tokens + np.arange(len(trie))
            room = (max_segment or num_tokens + len(trie)) - len(pieces[segment])
            if leaf and len(trie) <= room:
                pieces[segment] = np.concatenate([pieces[segment], trie.tokens])
                num_tokens += len(trie)
            else:
                append(trie.tokens, len(unique[at]), segment)

    # Each work item is a run of sorted prompts that agree on their first `depth` tokens, which are already laid out.
    work = [(lo, hi, 0, -1) for lo, hi in reversed(_split(shared, 0, len(unique), 0))]
    while work:
        lo, hi, depth, above = work.pop()
        first = unique[lo]
        if hi - lo == 1:
            finish(lo, add(first, depth, len(first), above), leaf=True)
            continue
        common = min(shared[lo : hi - 1])
        ends_here = len(first) == common  # the shortest prompt sorts first and may be a prefix of the others
        branches = _split(shared, lo + ends_here, hi, common)
        if (common - depth) * (len(branches) + ends_here - 1) >= min_saved:
            above = add(first, depth, common, above)
            if ends_here:
                finish(lo, above, leaf=False)
            depth = common
        elif ends_here:
            branches.insert(0, (lo, lo + 1))
        work.extend((a, b, depth, above) for a, b in reversed(branches))

    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    subtree_end = _subtree_ends(parent)
    positions = np.arange(num_tokens) + np.repeat(np.array(start, dtype=np.int64) - offsets[:-1], lengths)
    row_ends = np.repeat(offsets[subtree_end], lengths)
    if len(trie):
        lengths_read = np.array([len(prompt) for prompt in unique], dtype=np.int64)
        positions[rows[:, 1:]] = lengths_read[:, None] + trie.depths - 1
        row_ends[rows[:, 1:]] = rows[:, 1:2] + _subtree_ends(trie.parent.tolist())
    return PrefixTree(
        tokens=np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, dtype=np.int64),
        positions=positions,
        row_ends=row_ends,
        offsets=offsets,
        parent=np.array(parent, dtype=np.int64),
        subtree_end=subtree_end,
        rows=rows[inverse],
    )


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
    reads : int64 [num_read]
        Which entries of ``tree.rows``, flattened, are in this stream.
    read_rows : int64 [num_read]
        Their rows, ascending.
    """

    tokens: IntArray
    layout: SegmentLayout
    borrowed: tuple[int, ...]
    kept: tuple[tuple[int, int, int], ...]
    reads: IntArray
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
    lengths = np.diff(tree.offsets)
    read_order = np.argsort(tree.rows, axis=None, kind="stable")
    sorted_rows = tree.rows.ravel()[read_order]
    begin = 0
    while begin < tree.num_segments:
        room = tree.offsets[begin] + max_tokens
        end = max(int(np.searchsorted(tree.offsets, room, side="right")) - 1, begin + 1)
        borrowed = tree.ancestors(begin)
        first, last = int(tree.offsets[begin]), int(tree.offsets[end])

        key_tokens = np.concatenate(
            [*(np.arange(tree.offsets[s], tree.offsets[s + 1]) for s in borrowed), np.arange(first, last)]
        )
        num_borrowed = len(key_tokens) - (last - first)
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
        kept = tree.ancestors(end) if end < tree.num_segments else []
        lo, hi = np.searchsorted(sorted_rows, [first, last])
        yield PackedForward(
            tokens=tree.tokens[first:last],
            layout=layout_of(
                seen=np.stack([key_tokens, tree.row_ends[key_tokens]], axis=1).clip(first, last) - first,
                key_positions=tree.positions[key_tokens],
                own_offsets=tree.offsets[begin : end + 1] - first,
                own=[[key_range[s]] for s in range(begin, end)],
                shared=_shared_ranges(tree.parent, key_range, rows_below),
            ),
            borrowed=tuple(borrowed),
            kept=tuple((segment, *key_range[segment]) for segment in kept),
            reads=read_order[lo:hi],
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

"""A layout as calls of variable-length attention: as many as prefixes are nested deep, however many prompts there are.

Without a window the calls are

1. the rows over themselves. A *run* is rows of one segment each of which continues the row before it: the tokens of a
   prompt, or one branch below it. In its run a row is causal, so all rows are one call, with queries, keys and values
   as they lie in memory;
2. rows that do not start their segment's first run over the own keys that all of them see: what several branches
   continue, such as the prompt's tokens above the nodes of a trie, or the keys of the draws' common fact in a decode;
3. the same rows, run by run, over the few own keys that only some of them see;
4. for each level of sharing, rows over the keys of the prefixes above them.

A sliding window cuts a shared prefix differently for every row. There each segment is one causal sequence over the last
keys of its path, which needs segments without branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gatekern.layout import IntArray, Range, SegmentLayout, expand_ranges

_KEYS_PER_CALL = 1 << 18  # with a window keys are copied once per segment: at most about so many at a time

Index = slice | Tensor  # a run of consecutive rows or keys, which are views, or int64 indices


@dataclass(frozen=True)
class Call:
    """Sequences of rows with the keys that they see, one after the other."""

    rows: Index
    keys: Index
    row_offsets: Tensor  # int32 [num_sequences + 1], as `keys`' offsets: in the order of the indices
    key_offsets: Tensor
    max_rows: int
    max_keys: int
    causal: bool


@dataclass(frozen=True)
class Plan:
    """What to compute for one kind of layer.

    Attributes
    ----------
    first : tuple of Call
        Together every row once, in order.
    more : tuple of Call
        More keys of some rows, to be merged into the first results.
    """

    first: tuple[Call, ...]
    more: tuple[Call, ...]


@dataclass(frozen=True)
class _Sequences:
    """Row ranges, ascending and disjoint, with the keys that each sees."""

    rows: IntArray  # [num_sequences, 2]
    keys: IntArray  # [total], those of one sequence after the other's
    num_keys: IntArray  # [num_sequences]


def has_branches(layout: SegmentLayout) -> bool:
    """Whether some segment is more than a causal sequence over its own rows."""
    found = layout.derived.get("flash branches")
    if found is None:
        runs = _runs(layout)
        found = len(runs) > len(layout.own_offsets) or bool(_own_sequences(layout, runs))
        layout.derived["flash branches"] = found
    return bool(found)


def plan_of(layout: SegmentLayout, window: int | None, device: torch.device) -> Plan:
    """Plan layers with this window, on this device; computed once per layout."""
    key = ("flash", window, device)
    plan: Plan | None = layout.derived.get(key)
    if plan is None:
        plan = layout.derived[key] = _build(layout, window, device)
    return plan


def _build(layout: SegmentLayout, window: int | None, device: torch.device) -> Plan:
    return _unwindowed(layout, device) if window is None else _windowed(layout, window, device)


def _unwindowed(layout: SegmentLayout, device: torch.device) -> Plan:
    runs = _runs(layout)
    first_key = layout.num_keys - layout.num_rows
    themselves = _Sequences(
        np.stack([runs[:-1], runs[1:]], axis=1), first_key + np.arange(layout.num_rows), np.diff(runs)
    )
    more = [*_own_sequences(layout, runs), *_shared_sequences(layout)]
    return Plan(
        first=(_call(themselves, device, causal=True),),
        more=tuple(_call(sequences, device, causal=False) for sequences in more),
    )


def _runs(layout: SegmentLayout) -> IntArray:
    """Offsets of the runs over the rows. In depth-first order a row continues the one before it or does not see it."""
    continues = layout.seen[layout.num_keys - layout.num_rows :, 1][:-1] > np.arange(1, layout.num_rows)
    starts = np.concatenate([[True], ~continues])
    starts[layout.own_offsets[:-1]] = True
    return np.append(np.nonzero(starts)[0], layout.num_rows)


def _own_sequences(layout: SegmentLayout, runs: IntArray) -> list[_Sequences]:
    """Own keys outside a row's run: first those that all rows with such keys see in their segment, then the others.

    A key is seen by a range of rows, so by a range of runs; all the rows of a run see the same keys before it.
    """
    num_runs = len(runs) - 1
    keys = expand_ranges(layout.own_keys)
    of_range = np.repeat(np.arange(len(layout.own_offsets) - 1), np.diff(layout.own_key_offsets))
    segment = np.repeat(of_range, layout.own_keys[:, 1] - layout.own_keys[:, 0])
    as_row = keys - (layout.num_keys - layout.num_rows)
    begin = np.maximum(layout.seen[keys, 0], as_row + 1)  # the run of the key's own row has it already
    end = np.minimum(layout.seen[keys, 1], layout.own_offsets[segment + 1])
    first, stop = np.searchsorted(runs[:-1], begin), np.searchsorted(runs[:-1], end)

    first_run = np.full(len(layout.own_offsets) - 1, num_runs)
    outside = first < stop
    np.minimum.at(first_run, segment[outside], first[outside])
    stop_run = np.searchsorted(runs, layout.own_offsets[1:])
    common = outside & (first == first_run[segment]) & (stop == stop_run[segment])
    some = outside & ~common

    seen_by = expand_ranges(np.stack([first, stop], axis=1)[some])
    seen = np.repeat(keys[some], (stop - first)[some])
    found = [
        _nonempty(runs[first_run], layout.own_offsets[1:], keys[common], segment[common]),
        _nonempty(runs[:-1], runs[1:], seen[np.argsort(seen_by, kind="stable")], seen_by),
    ]
    return [sequences for sequences in found if len(sequences.rows)]


def _nonempty(begin: IntArray, end: IntArray, keys: IntArray, owner: IntArray) -> _Sequences:
    """Of candidates ``begin..end`` those that own keys; `keys` are in the order of their owners."""
    num_keys = np.bincount(owner, minlength=len(begin))
    used = num_keys > 0
    return _Sequences(np.stack([begin, end], axis=1)[used], keys, num_keys[used])


def _shared_sequences(layout: SegmentLayout) -> list[_Sequences]:
    """Prefixes above the rows, by level: row ranges of one level are disjoint."""
    levels: list[list[tuple[Range, list[Range]]]] = []
    for entry in sorted(layout.shared(), key=lambda entry: (entry[0][0], -entry[0][1])):
        free = (level for level in levels if level[-1][0][1] <= entry[0][0])
        level = next(free, None)
        if level is None:
            levels.append([entry])
        else:
            level.append(entry)
    return [_sequences([rows for rows, _ in level], [keys for _, keys in level]) for level in levels]


def _windowed(layout: SegmentLayout, window: int, device: torch.device) -> Plan:
    rows = list(pairwise(layout.own_offsets.tolist()))
    paths: list[list[Range]] = [[] for _ in rows]
    for (begin, end), keys in layout.shared():
        first, stop = np.searchsorted(layout.own_offsets, [begin, end]).tolist()
        for path in paths[first:stop]:
            path.extend(keys)
    first_key = layout.num_keys - layout.num_rows
    for path, (begin, end) in zip(paths, rows, strict=True):
        path.sort(key=lambda keys: int(layout.key_positions[keys[0]]))
        path[:] = [*_last(path, window - 1), (first_key + begin, first_key + end)]

    calls = []
    total = np.cumsum([sum(end - begin for begin, end in path) for path in paths])
    cuts = np.nonzero(np.diff(total // _KEYS_PER_CALL))[0] + 1
    for begin, end in pairwise([0, *cuts.tolist(), len(rows)]):
        calls.append(_call(_sequences(rows[begin:end], paths[begin:end]), device, causal=True))
    return Plan(first=tuple(calls), more=())


def _last(ranges: Sequence[Range], count: int) -> list[Range]:
    """The last `count` indices of some ranges."""
    kept: list[Range] = []
    for begin, end in reversed(ranges):
        if count > 0:
            kept.append((max(begin, end - count), end))
            count -= end - begin
    return kept[::-1]


def _sequences(rows: Sequence[Range], keys: Sequence[Sequence[Range]]) -> _Sequences:
    flat = np.array([one for some in keys for one in some], dtype=np.int64).reshape(-1, 2)
    num_keys = np.array([sum(end - begin for begin, end in some) for some in keys])
    return _Sequences(np.array(rows, dtype=np.int64).reshape(-1, 2), expand_ranges(flat), num_keys)


def _call(sequences: _Sequences, device: torch.device, *, causal: bool) -> Call:
    num_rows = sequences.rows[:, 1] - sequences.rows[:, 0]
    row_offsets, key_offsets = _offsets(num_rows, device), _offsets(sequences.num_keys, device)
    return Call(
        rows=_index(expand_ranges(sequences.rows), device),
        keys=_index(sequences.keys, device),
        row_offsets=row_offsets,
        key_offsets=key_offsets,
        max_rows=int(num_rows.max()),
        max_keys=int(sequences.num_keys.max()),
        causal=causal,
    )


def _index(index: IntArray, device: torch.device) -> Index:
    if (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index).to(device)


def _offsets(lengths: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
